#include "kvlink/handoff/reach.hpp"

#include <algorithm>

#include "kvlink/transport/faulty_receiver.hpp"
#include "kvlink/transport/faulty_transfer.hpp"

namespace kvlink::handoff {

using transport::Lane;

Reach Reach::open(SourceFacts facts, const std::vector<Lane>& wanted, bool has_ucx) {
  Reach reach;
  reach.facts_ = std::move(facts);
  for (const Lane lane : wanted) {
    std::string refusal = reach.open_lane(lane, has_ucx);
    if (refusal.empty()) {
      reach.lanes_.push_back(lane);
    } else {
      reach.refused_.emplace_back(lane, std::move(refusal));
    }
  }
  reach.facts_.region_fds.clear();  // What was mapped stays mapped without its descriptor.
  return reach;
}

Reach Reach::to_claimant(std::vector<std::byte> ucx_address, bool same_host) {
  Reach reach;
  reach.facts_.ucx_address = std::move(ucx_address);
  reach.facts_.same_host = same_host;
  return reach;
}

std::string Reach::open_lane(Lane lane, bool has_ucx) {
  try {
    switch (lane) {
      case Lane::mapped: {
        auto mapped = std::make_shared<transport::MappedSource>();
        if (facts_.region_fds.size() != facts_.region_bytes.size()) return "the peer is on another host";
        for (std::size_t i = 0; i < facts_.region_fds.size(); ++i) {
          if (!facts_.region_fds[i])
            return "region " + std::to_string(i) + " of the source was not made by kvlink.empty";
          mapped->regions.push_back(
              std::make_shared<transport::Mapping>(std::move(facts_.region_fds[i]), facts_.region_bytes[i]));
        }
        mapped_ = std::move(mapped);
        return {};
      }
      case Lane::vectored:
        if (!facts_.same_host || facts_.pid == 0) return "the source's process is not visible from here";
        vectored_ = transport::open_vectored_source(facts_.pid, facts_.region_addresses);
        return {};
      case Lane::get:
        if (!has_ucx || facts_.ucx_address.empty()) return "UCX is not used by both sides";
        if (facts_.keys.size() != facts_.region_bytes.size()) return "the source gave no remote keys";
        return {};
      case Lane::staged:
        return !has_ucx || facts_.ucx_address.empty() ? "UCX is not used by both sides" : "";
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "no such lane";
}

void Reach::try_first_lane(Services& services, const std::string& peer) noexcept {
  if (lanes_.size() < 2 || lanes_.front() != Lane::get) return;
  try {
    static_cast<void>(get_source(services, peer));
  } catch (const Error& error) {
    if (error.code() != Code::lane_unavailable) return;  // The handoff that meets it again says so.
    given_up_ = error.what();
    refused_.emplace_back(Lane::get, given_up_);
    lanes_.erase(lanes_.begin());
  }
}

std::string Reach::why_not(Lane lane) const {
  if (std::ranges::find(lanes_, lane) != lanes_.end()) return {};
  for (const auto& [refused, why] : refused_) {
    if (refused == lane) return why;
  }
  return "this node does not allow it";
}

const std::shared_ptr<transport::ucx::Endpoint>& Reach::endpoint(Services& services, const std::string& peer) {
  if (endpoint_ && endpoint_->failed()) {
    get_.reset();
    endpoint_.reset();
  }
  if (!endpoint_) {
    if (!services.ucx) throw Error(Code::lane_unavailable, "this node does not use UCX");
    endpoint_ = open_endpoint(services, peer);
    transports_ = endpoint_->transports();
  }
  return endpoint_;
}

const std::shared_ptr<transport::ucx::Worker>& Reach::own_worker(Services& services) {
  if (!services.ucx) throw Error(Code::lane_unavailable, "this node does not use UCX");
  if (!own_worker_) own_worker_ = services.private_workers.add(*services.ucx);
  return own_worker_;
}

const std::shared_ptr<transport::ucx::Endpoint>& Reach::own_endpoint(Services& services,
                                                                     std::span<const std::byte> address,
                                                                     const std::string& peer) {
  if (!own_endpoint_ || own_endpoint_->failed() || !std::ranges::equal(own_address_, address)) {
    own_endpoint_ = std::make_shared<transport::ucx::Endpoint>(own_worker(services), address,
                                                               transport::ucx::FailureMode::none, peer);
    own_address_.assign(address.begin(), address.end());
    transports_ = own_endpoint_->transports();
  }
  return own_endpoint_;
}

std::shared_ptr<transport::ucx::Endpoint> Reach::open_endpoint(Services& services, const std::string& peer) {
  // Only mode `none` has shared-memory and CMA lanes; only mode `peer` survives a dead peer on a network. And what mode
  // `none` has mapped of a peer it frees only with the worker, so that has to end with the connection.
  if (!facts_.same_host) {
    return std::make_shared<transport::ucx::Endpoint>(services.ucx, facts_.ucx_address,
                                                      transport::ucx::FailureMode::peer, peer);
  }
  return std::make_shared<transport::ucx::Endpoint>(own_worker(services), facts_.ucx_address,
                                                    transport::ucx::FailureMode::none, peer);
}

std::shared_ptr<const transport::GetSource> Reach::get_source(Services& services, const std::string& peer) {
  const auto& way = endpoint(services, peer);
  if (!get_) {
    std::vector<transport::RemoteRegion> regions;
    for (std::size_t i = 0; i < facts_.keys.size(); ++i) {
      regions.push_back(
          {.address = facts_.region_addresses[i], .bytes = facts_.region_bytes[i], .packed_key = facts_.keys[i]});
    }
    get_ = transport::make_get_source(way, regions);
  }
  return get_;
}

std::function<std::shared_ptr<transport::Transfer>(std::shared_ptr<const plan::Plan>)> Reach::one_sided(
    Lane lane, const std::shared_ptr<const transport::LocalMemory>& memory, Services& services,
    const std::string& peer) {
  switch (lane) {
    case Lane::mapped:
      return [source = mapped_, memory, &services](std::shared_ptr<const plan::Plan> plan) {
        return transport::make_mapped_transfer(std::move(plan), source, memory, *services.copy_threads, services.waker);
      };
    case Lane::vectored:
      return [source = vectored_, memory, &services](std::shared_ptr<const plan::Plan> plan) {
        return transport::make_vectored_transfer(std::move(plan), source, memory, *services.copy_threads,
                                                 services.waker);
      };
    case Lane::get:
      return [source = get_source(services, peer), memory](std::shared_ptr<const plan::Plan> plan) {
        return transport::make_get_transfer(std::move(plan), source, memory, {});
      };
    case Lane::staged:
      break;
  }
  throw Error(Code::lane_unavailable, "no such lane");
}

Reach::Started Reach::make_transfer(Lane lane, std::shared_ptr<const plan::Plan> plan,
                                    const std::shared_ptr<const transport::LocalMemory>& memory, Services& services,
                                    const std::string& peer) {
  if (lane == Lane::staged) {
    const std::uint64_t bytes = plan->total_bytes();
    auto receiver = transport::StagedReceiver::create(std::move(plan), memory, kWindowChunks, *services.copy_threads,
                                                      services.waker);
    if (services.faults) {
      receiver = std::make_shared<transport::FaultyReceiver>(std::move(receiver), bytes, services.faults);
    }
    Started started{receiver, receiver};
    if (facts_.same_host && services.ucx) {
      const auto address = own_worker(services)->address();
      started.chunk_address.assign(address.begin(), address.end());
    }
    return started;
  }
  auto make = one_sided(lane, memory, services, peer);
  if (services.faults) {
    return {std::make_shared<transport::FaultyTransfer>(std::move(plan), std::move(make), memory, services.faults),
            nullptr};
  }
  return {make(std::move(plan)), nullptr};
}

std::shared_ptr<transport::StagedSender> Reach::make_sender(std::shared_ptr<const plan::Plan> plan,
                                                            const AttemptId& attempt, Services& services,
                                                            const std::string& peer,
                                                            std::span<const std::byte> chunk_address) {
  if (!chunks_) chunks_ = std::make_shared<transport::ChunkPool>(kChunkBytes, 2 * kWindowChunks);
  const bool own = facts_.same_host && !chunk_address.empty();
  const auto& way = own ? own_endpoint(services, chunk_address, peer) : endpoint(services, peer);
  return std::make_shared<transport::StagedSender>(std::move(plan), services.memory, way, attempt, chunks_,
                                                   kWindowChunks, *services.copy_threads, services.waker);
}

void Reach::close() noexcept {
  chunks_.reset();
  own_endpoint_.reset();
  own_worker_.reset();
  get_.reset();
  endpoint_.reset();
  mapped_.reset();
  vectored_.reset();
}

}  // namespace kvlink::handoff
