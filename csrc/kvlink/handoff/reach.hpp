// How one peer's memory is reached, lane by lane; and how this node's memory is sent to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/handoff/services.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/chunk_pool.hpp"
#include "kvlink/transport/get_transfer.hpp"
#include "kvlink/transport/lane.hpp"
#include "kvlink/transport/mapped_transfer.hpp"
#include "kvlink/transport/staged_receiver.hpp"
#include "kvlink/transport/staged_sender.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"
#include "kvlink/transport/vectored_transfer.hpp"

namespace kvlink::handoff {

inline constexpr std::uint32_t kChunkBytes = 512U << 10U;
/// Chunks that a source may have on their way before the target gives credit: 4 MiB stay inside a cache.
inline constexpr std::uint32_t kWindowChunks = 8;

/// What a peer that we read from told about its memory.
struct SourceFacts {
  std::vector<std::uint64_t> region_bytes;
  std::vector<std::uint64_t> region_addresses;
  std::vector<transport::UniqueFd> region_fds;  // none, or one a region; an empty one cannot be mapped
  int pid{0};                                   // as this process sees it; 0: not readable
  std::vector<std::vector<std::byte>> keys;     // packed, one a region; none without UCX
  std::vector<std::byte> ucx_address;
  bool same_host{false};
};

class Reach {
 public:
  Reach() = default;

  /// Opens those of `wanted` that this peer allows, and notes why the others are not to be had. Any thread; may wait
  /// for the kernel, never for the peer. UCX's lanes are opened at their first use.
  [[nodiscard]] static Reach open(SourceFacts facts, const std::vector<transport::Lane>& wanted, bool has_ucx);
  /// For a peer that reads from us: only what staged needs.
  [[nodiscard]] static Reach to_claimant(std::vector<std::byte> ucx_address, bool same_host);

  /// Usable lanes, best first.
  [[nodiscard]] const std::vector<transport::Lane>& lanes() const noexcept { return lanes_; }
  [[nodiscard]] const std::string& transports() const noexcept { return transports_; }
  /// What was given up since they were opened, and why; empty if nothing.
  [[nodiscard]] const std::string& given_up() const noexcept { return given_up_; }
  /// Why `lane` is not among them; empty if it is.
  [[nodiscard]] std::string why_not(transport::Lane lane) const;

  /// Gives up `get` where it comes first, UCX would only emulate it, and there is another lane to take: only UCX knows
  /// what a kernel that denies ptrace, or a container, leaves of it. Progress thread.
  void try_first_lane(Services& services, const std::string& peer) noexcept;

  struct Started {
    std::shared_ptr<transport::Transfer> transfer;
    std::shared_ptr<transport::StagedReceiver> receiver;  // the same object, on the staged lane
    std::vector<std::byte> chunk_address{};  // where the source is to send chunks; none: where the handshake said
  };
  /// `memory` has the regions that the plan is made for. Progress thread. Throws Error(lane_unavailable) when UCX finds
  /// no way.
  [[nodiscard]] Started make_transfer(transport::Lane lane, std::shared_ptr<const plan::Plan> plan,
                                      const std::shared_ptr<const transport::LocalMemory>& memory, Services& services,
                                      const std::string& peer);
  /// Progress thread. `chunk_address`: what the reader said of the same name. Throws Error(lane_unavailable),
  /// Error(transport_failed).
  [[nodiscard]] std::shared_ptr<transport::StagedSender> make_sender(std::shared_ptr<const plan::Plan> plan,
                                                                     const AttemptId& attempt, Services& services,
                                                                     const std::string& peer,
                                                                     std::span<const std::byte> chunk_address);
  /// Gives UCX's endpoint and keys back; transfers that still use them keep theirs. Progress thread.
  void close() noexcept;

 private:
  [[nodiscard]] const std::shared_ptr<transport::ucx::Worker>& own_worker(Services& services);
  [[nodiscard]] const std::shared_ptr<transport::ucx::Endpoint>& own_endpoint(Services& services,
                                                                              std::span<const std::byte> address,
                                                                              const std::string& peer);
  [[nodiscard]] std::string open_lane(transport::Lane lane, bool has_ucx);
  [[nodiscard]] const std::shared_ptr<transport::ucx::Endpoint>& endpoint(Services& services, const std::string& peer);
  [[nodiscard]] std::shared_ptr<transport::ucx::Endpoint> open_endpoint(Services& services, const std::string& peer);
  [[nodiscard]] std::shared_ptr<const transport::GetSource> get_source(Services& services, const std::string& peer);
  /// What makes the transfers of a lane in which the source has no part. Throws as `make_transfer`.
  [[nodiscard]] std::function<std::shared_ptr<transport::Transfer>(std::shared_ptr<const plan::Plan>)> one_sided(
      transport::Lane lane, const std::shared_ptr<const transport::LocalMemory>& memory, Services& services,
      const std::string& peer);

  SourceFacts facts_;
  std::vector<transport::Lane> lanes_;
  std::vector<std::pair<transport::Lane, std::string>> refused_;
  std::string given_up_;
  std::string transports_;
  std::shared_ptr<const transport::MappedSource> mapped_;
  std::shared_ptr<const transport::VectoredSource> vectored_;
  std::shared_ptr<transport::ucx::Worker> own_worker_;  // for all that UCX does with a peer of this host
  std::vector<std::byte> own_address_;                  // where `own_endpoint_` leads
  std::shared_ptr<transport::ucx::Endpoint> own_endpoint_;
  std::shared_ptr<transport::ucx::Endpoint> endpoint_;
  std::shared_ptr<const transport::GetSource> get_;
  std::shared_ptr<transport::ChunkPool> chunks_;
};

}  // namespace kvlink::handoff
