#include "kvlink/handoff/engine.hpp"

#include <algorithm>
#include <chrono>
#include <future>

#include "kvlink/clock.hpp"

namespace kvlink::handoff {

std::int64_t deadline_after(std::int64_t duration_ms, const char* what) {
  constexpr std::uint64_t kLongestMs = 7ULL * 24 * 3600 * 1000;
  if (duration_ms < 0 || static_cast<std::uint64_t>(duration_ms) > kLongestMs) {
    throw Error(Code::invalid_argument,
                std::string(what) + " must be between 0 and 7 days, not " + std::to_string(duration_ms) + " ms");
  }
  return now_ns() + duration_ms * kNsPerMs;
}

namespace {

void check_dialect(std::uint8_t dialect) {
  if (dialect > kNewestDialect) {
    throw Error(Code::version_mismatch, "the native core speaks control frames up to dialect " +
                                            std::to_string(kNewestDialect) + ", not " + std::to_string(dialect));
  }
}

}  // namespace

Engine::Engine(EngineOptions options)
    : offers_(services_),
      pulls_(services_, options.window),
      max_handoffs_(options.max_handoffs),
      lease_cap_ms_(options.lease_cap_ms),
      max_quarantined_blocks_(options.max_quarantined_blocks),
      next_peer_(kFirstPeer) {
  services_.epoch = options.epoch;
  services_.bells = options.bells ? std::move(options.bells) : std::make_shared<Bells>();
  services_.memory = std::make_shared<transport::LocalMemory>(options.regions);
  services_.holds = std::make_shared<Holds>(std::move(options.groups));
  services_.own_template = std::move(options.own_template);
  services_.router = std::make_shared<transport::ChunkRouter>();
  services_.copy_threads = std::make_unique<transport::CopyThreads>(options.copy_threads);
  if (options.ucx) {
    services_.ucx = transport::ucx::Worker::create(options.ucx, services_.router);
    if (options.ucx->one_sided()) {
      for (const auto& region : options.regions) {
        registrations_.push_back(std::make_unique<transport::ucx::MemoryRegion>(options.ucx, region));
      }
    }
    poller_.watch(services_.ucx->event_fd(), kUcxToken);
  }
  poller_.watch(services_.waker.fd(), kWakerToken);
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  close(0);
}

void Engine::close(std::int64_t timeout_ns, const Failure& why) {
  const std::lock_guard one_at_a_time(close_mutex_);
  if (!thread_.joinable()) return;
  {
    // One critical section: what was accepted before stands in front of the sweep, and nothing comes behind it.
    const std::lock_guard lock(mutex_);
    tasks_.emplace_back([this, timeout_ns, why] {
      offers_.refuse_parked(why);
      offers_.close_all(why);
      pulls_.close_all(why);
      drain_until_ns_ = now_ns() + std::max<std::int64_t>(1, timeout_ns);
    });
    closed_ = why;
  }
  services_.waker.ring();
  thread_.join();
}

void Engine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(closed_->code, closed_->message);
    tasks_.push_back(std::move(task));
  }
  services_.waker.ring();
}

void Engine::refuse_new(const std::optional<Failure>& why) {
  {
    const std::lock_guard lock(mutex_);
    refusing_ = why;
  }
  post([this, why] {
    refusing_claims_ = why;
    if (why) offers_.refuse_parked(*why);
  });
}

void Engine::check_taking() const {
  if (const auto& why = closed_ ? closed_ : refusing_) throw Error(why->code, why->message);
}

std::vector<std::byte> Engine::ucx_address() const {
  if (!services_.ucx) return {};
  const auto address = services_.ucx->address();
  return {address.begin(), address.end()};
}

std::vector<std::vector<std::byte>> Engine::packed_keys() const {
  std::vector<std::vector<std::byte>> keys;
  for (const auto& registration : registrations_) {
    const auto key = registration->packed_key();
    keys.emplace_back(key.begin(), key.end());
  }
  return keys;
}

PeerPtr Engine::new_peer(PeerRole role, std::string address) {
  auto created = std::make_shared<Peer>();
  created->id = next_peer_.fetch_add(1);
  created->role = role;
  created->address = std::move(address);
  const std::lock_guard lock(mutex_);
  alive_.insert(created->id);
  return created;
}

bool Engine::is_peer_lost(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return !alive_.contains(id);
}

std::uint64_t Engine::expect_peer(std::string address) {
  const PeerPtr created = new_peer(PeerRole::source, std::move(address));
  post([this, created] { peers_[created->id] = created; });
  return created->id;
}

std::vector<transport::Lane> Engine::attach_source(std::uint64_t id, int fd, std::uint8_t dialect, Epoch epoch,
                                                   std::string name, std::shared_ptr<const plan::Template> geometry,
                                                   std::shared_ptr<const plan::Conversion> conversion,
                                                   SourceFacts facts, const std::vector<transport::Lane>& wanted) {
  transport::UniqueFd owned(fd);
  check_dialect(dialect);
  auto reach = std::make_shared<Reach>(Reach::open(std::move(facts), wanted, services_.ucx != nullptr));
  auto lanes = reach->lanes();
  if (lanes.empty()) {
    std::string why;
    for (const transport::Lane lane : wanted) {
      why += (why.empty() ? "" : "; ") + std::string(transport::lane_name(lane)) + ": " + reach->why_not(lane);
    }
    Failure failure{Code::lane_unavailable, "no lane leads to this peer: " + why};
    fail_peer(id, failure);
    throw Error(failure.code, failure.message);
  }
  // A std::function must be copyable, so the descriptor travels in a shared holder.
  auto holder = std::make_shared<transport::UniqueFd>(std::move(owned));
  post([this, id, holder, dialect, epoch, name = std::move(name), geometry = std::move(geometry),
        conversion = std::move(conversion), reach] {
    const PeerPtr found = peer(id);
    if (!found || found->state != PeerState::connecting) return;
    found->dialect = dialect;
    found->epoch = epoch;
    found->name = name;
    found->layout_template = geometry;
    found->conversion = conversion;
    found->reach = std::move(*reach);
    connect(found, holder->release());
    if (found->state != PeerState::ready) return;
    found->reach.try_first_lane(services_, found->title());
    pulls_.on_peer_ready(found);
  });
  return lanes;
}

std::uint64_t Engine::attach_claimant(int fd, std::uint8_t dialect, Epoch epoch, std::string name, std::string address,
                                      std::shared_ptr<const plan::Template> geometry,
                                      std::vector<std::byte> ucx_address, bool same_host) {
  auto holder = std::make_shared<transport::UniqueFd>(fd);
  check_dialect(dialect);
  const PeerPtr created = new_peer(PeerRole::claimant, std::move(address));
  created->dialect = dialect;
  created->epoch = epoch;
  created->name = std::move(name);
  created->layout_template = std::move(geometry);
  created->reach = Reach::to_claimant(std::move(ucx_address), same_host);
  post([this, created, holder] {
    peers_[created->id] = created;
    connect(created, holder->release());
  });
  return created->id;
}

void Engine::connect(const PeerPtr& connected, int fd) {
  connected->channel = std::make_unique<Channel>(fd, connected->dialect);
  connected->state = PeerState::ready;
  try {
    poller_.watch(fd, connected->id);
  } catch (const Error& error) {
    lose(connected, {error.code(), error.what()});
  }
}

void Engine::fail_peer(std::uint64_t id, Failure failure) {
  {
    // At once, so that a pull which is submitted after this call does not ride on the connection that it ends.
    const std::lock_guard lock(mutex_);
    alive_.erase(id);
  }
  post([this, id, failure = std::move(failure)] {
    if (const PeerPtr found = peer(id)) lose(found, failure);
  });
}

std::vector<PeerReport> Engine::peers() {
  auto promise = std::make_shared<std::promise<std::vector<PeerReport>>>();
  auto answer = promise->get_future();
  post([this, promise] {
    std::vector<PeerReport> reports;
    for (const auto& [id, each] : peers_) {
      reports.push_back({.id = id,
                         .role = each->role,
                         .state = each->state,
                         .name = each->name,
                         .address = each->address,
                         .epoch = each->epoch,
                         .lanes = each->reach.lanes(),
                         .given_up = each->reach.given_up(),
                         .transports = each->reach.transports(),
                         .handoffs = each->handoffs,
                         .bytes = each->bytes,
                         .bytes_per_s = each->rate.bytes_per_s()});
    }
    promise->set_value(std::move(reports));
  });
  // The loop never blocks, so this ends with its next turn; the bound is for a machine that stands still.
  if (answer.wait_for(std::chrono::seconds(10)) != std::future_status::ready) {
    throw Error(Code::busy, "the progress thread did not answer within 10 s");
  }
  return answer.get();
}

void Engine::admit_one() {
  if (services_.counters.live.fetch_add(1) >= max_handoffs_) {
    services_.counters.live.fetch_sub(1);
    throw Error(Code::busy, "this node has " + std::to_string(max_handoffs_) +
                                " live handoffs, its limit; wait for some to be released or raise max_handoffs");
  }
}

std::shared_ptr<Handoff> Engine::offer(OfferOptions options) {
  if (options.readers == 0) throw Error(Code::invalid_argument, "readers must be at least 1");
  if (options.payload.size() > kMaxPayloadBytes) {
    throw Error(Code::invalid_argument, "the payload has " + std::to_string(options.payload.size()) +
                                            " bytes, at most " + std::to_string(kMaxPayloadBytes) +
                                            " travel with a handoff");
  }
  const std::int64_t expires_ns = deadline_after(options.ttl_ms, "ttl");
  if (options.retry_ms) (void)deadline_after(*options.retry_ms, "retry");
  BlockTables blocks = touched(options.blocks, services_.holds->groups(), 0, options.num_tokens);
  admit_one();
  try {
    services_.holds->acquire_shared(blocks);
  } catch (...) {
    services_.counters.live.fetch_sub(1);
    throw;
  }
  services_.counters.offers.fetch_add(1);
  const HandoffId handoff =
      options.id ? *options.id : HandoffId{.epoch = services_.epoch, .sequence = next_sequence_.fetch_add(1)};
  const AttemptId id{.handoff = handoff, .attempt = 0};
  auto handle = std::make_shared<Handoff>(Role::offer, id, std::move(options.label), State::offered, services_.bells);
  const std::lock_guard lock(mutex_);  // So that no offer slips in behind the sweep of `close`.
  try {
    check_taking();  // Behind `admit_one`: whoever drains the node sees this offer, or this offer sees it drained.
  } catch (...) {
    services_.holds->release_shared(blocks);
    services_.counters.live.fetch_sub(1);
    throw;
  }
  offers_.add({.handle = handle,
               .blocks = std::move(blocks),
               .num_tokens = options.num_tokens,
               .expires_ns = expires_ns,
               .ttl_ms = options.ttl_ms,
               .cap_ns = expires_ns + std::max<std::int64_t>(0, lease_cap_ms_ - options.ttl_ms) * kNsPerMs,
               .retry_ms = options.retry_ms,
               .readers = options.readers,
               .integrity = options.integrity,
               .payload = std::move(options.payload)});
  return handle;
}

std::shared_ptr<Handoff> Engine::pull(PullOptions options) {
  if (options.sources.empty()) throw Error(Code::invalid_argument, "a pull needs a source");
  if (options.ranks == 0 || options.ranks > kMaxRanks) {
    throw Error(Code::invalid_argument,
                "ranks is " + std::to_string(options.ranks) + ", outside [1, " + std::to_string(kMaxRanks) + "]");
  }
  if (options.skip_tokens > options.num_tokens) {
    throw Error(Code::invalid_argument, "skip_tokens is " + std::to_string(options.skip_tokens) + ", the handoff has " +
                                            std::to_string(options.num_tokens) + " tokens");
  }
  const auto request = hold_for_pull(std::move(options.blocks), options.skip_tokens, options.num_tokens,
                                     deadline_after(options.deadline_ms, "deadline"));
  services_.counters.pulls.fetch_add(1);
  for (const PullSource& source : options.sources) {
    request->parts.push_back(
        {.attempt = {.handoff = source.id, .attempt = next_attempt_.fetch_add(1)}, .peer = nullptr});
  }
  auto handle = std::make_shared<Handoff>(Role::pull, request->parts.front().attempt, std::move(options.label),
                                          State::connecting, services_.bells);
  request->handle = handle;
  request->lane = options.lane;
  request->integrity = options.integrity;
  request->ranks = options.ranks;
  try {
    {
      const std::lock_guard lock(mutex_);
      check_taking();
    }
    post([this, sources = std::move(options.sources), request] {
      for (std::size_t i = 0; i < sources.size(); ++i) request->parts[i].peer = peer_or_lost(sources[i].peer);
      pulls_.submit(std::move(*request));
    });
  } catch (...) {
    let_go(*request);
    throw;
  }
  return handle;
}

std::shared_ptr<PullRequest> Engine::hold_for_pull(BlockTables blocks, std::uint64_t skip_tokens,
                                                   std::uint64_t num_tokens, std::int64_t deadline_ns) {
  BlockTables written = touched(blocks, services_.holds->groups(), skip_tokens, num_tokens);
  services_.quarantine.check(max_quarantined_blocks_);
  admit_one();
  try {
    services_.holds->acquire_exclusive(written);
  } catch (...) {
    services_.counters.live.fetch_sub(1);
    throw;
  }
  auto request = std::make_shared<PullRequest>();
  request->blocks = std::move(blocks);
  request->written = std::move(written);
  request->num_tokens = num_tokens;
  request->skip_tokens = skip_tokens;
  request->submitted_ns = now_ns();
  request->deadline_ns = deadline_ns;
  return request;
}

void Engine::let_go(const PullRequest& request) noexcept {
  services_.holds->release_exclusive(request.written);
  services_.counters.live.fetch_sub(1);
}

void Engine::cancel(const std::shared_ptr<Handoff>& handle) {
  fail(handle, {Code::cancelled, "cancelled by its owner"});
}

void Engine::fail(const std::shared_ptr<Handoff>& handle, Failure why) {
  if (handle->has_outcome()) return;
  post([this, handle, why = std::move(why)] {
    if (handle->role() == Role::offer || handle->role() == Role::push) {
      offers_.cancel(handle->id().handoff, why);
    } else {
      pulls_.cancel(handle->id(), why);
    }
  });
}

}  // namespace kvlink::handoff
