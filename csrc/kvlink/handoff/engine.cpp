#include "kvlink/handoff/engine.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>

#include "kvlink/clock.hpp"

namespace kvlink::handoff {
namespace {

constexpr std::uint64_t kWakerToken = 0;
constexpr std::uint64_t kUcxToken = 1;
constexpr std::uint64_t kFirstPeer = 16;
/// A loop that was busy keeps looking for this long before it sleeps: an answer often comes within it.
constexpr std::int64_t kSpinNs = 20'000;
constexpr std::int64_t kLongestSleepNs = 60'000 * kNsPerMs;
constexpr std::uint64_t kLongestMs = 7ULL * 24 * 3600 * 1000;

[[nodiscard]] std::int64_t deadline_after(std::int64_t duration_ms, const char* what) {
  if (duration_ms < 0 || static_cast<std::uint64_t>(duration_ms) > kLongestMs) {
    throw Error(Code::invalid_argument, std::string(what) + " must be between 0 and 7 days, not " +
                                            std::to_string(duration_ms) + " ms");
  }
  return now_ns() + duration_ms * kNsPerMs;
}

/// The entries of each table that hold tokens of [first, end); all others are cut off or made holes.
[[nodiscard]] BlockTables entries_between(const BlockTables& tables, const std::vector<Group>& groups,
                                          std::uint64_t first, std::uint64_t end) {
  if (tables.size() != groups.size()) {
    throw Error(Code::invalid_argument, "block tables for " + std::to_string(tables.size()) + " groups, the cache has " +
                                            std::to_string(groups.size()));
  }
  BlockTables out;
  for (std::size_t g = 0; g < tables.size(); ++g) {
    const std::uint64_t tokens = groups[g].block_tokens;
    const std::uint64_t needed = (end + tokens - 1) / tokens;
    if (tables[g].size() < needed) {
      throw Error(Code::invalid_argument, std::to_string(end) + " tokens need " + std::to_string(needed) +
                                              " blocks of group '" + groups[g].name + "', " +
                                              std::to_string(tables[g].size()) + " are given");
    }
    auto& kept = out.emplace_back(tables[g].begin(), tables[g].begin() + static_cast<std::ptrdiff_t>(needed));
    const std::uint64_t skipped = first == end ? needed : std::min(needed, first / tokens);
    std::fill_n(kept.begin(), skipped, -1);
  }
  return out;
}

/// Signals belong to the application's threads.
void block_signals() noexcept {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

Engine::Engine(EngineOptions options)
    : offers_(services_), pulls_(services_), max_handoffs_(options.max_handoffs), next_peer_(kFirstPeer) {
  services_.epoch = options.epoch;
  services_.bells = std::make_shared<Bells>();
  services_.memory = std::make_shared<transport::LocalMemory>(options.regions);
  services_.holds = std::make_shared<Holds>(std::move(options.groups));
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

Engine::~Engine() { close(0); }

void Engine::close(std::int64_t timeout_ns) {
  const std::lock_guard one_at_a_time(close_mutex_);
  if (!thread_.joinable()) return;
  {
    // One critical section: what was accepted before stands in front of the sweep, and nothing comes behind it.
    const std::lock_guard lock(mutex_);
    tasks_.emplace_back([this, timeout_ns] {
      const Failure failure{Code::closed, "the node was closed"};
      offers_.close_all(failure);
      pulls_.close_all(failure);
      drain_until_ns_ = now_ns() + std::max<std::int64_t>(1, timeout_ns);
    });
    closed_ = true;
  }
  services_.waker.ring();
  thread_.join();
}

void Engine::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(Code::closed, "the node is closed");
    tasks_.push_back(std::move(task));
  }
  services_.waker.ring();
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

std::uint64_t Engine::expect_peer(std::string address) {
  auto created = std::make_shared<Peer>();
  created->id = next_peer_.fetch_add(1);
  created->role = PeerRole::source;
  created->address = std::move(address);
  post([this, created] { peers_[created->id] = created; });
  return created->id;
}

std::vector<transport::Lane> Engine::attach_source(std::uint64_t id, int fd, Epoch epoch, std::string name,
                                                   std::shared_ptr<const plan::Template> geometry, SourceFacts facts,
                                                   const std::vector<transport::Lane>& wanted) {
  transport::UniqueFd owned(fd);
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
  post([this, id, holder, epoch, name = std::move(name), geometry = std::move(geometry), reach] {
    const PeerPtr found = peer(id);
    if (!found || found->state != PeerState::connecting) return;
    found->epoch = epoch;
    found->name = name;
    found->layout_template = geometry;
    found->reach = std::move(*reach);
    connect(found, holder->release());
    if (found->state == PeerState::ready) pulls_.on_peer_ready(found);
  });
  return lanes;
}

std::uint64_t Engine::attach_claimant(int fd, Epoch epoch, std::string name, std::string address,
                                      std::shared_ptr<const plan::Template> geometry,
                                      std::vector<std::byte> ucx_address, bool same_host) {
  auto holder = std::make_shared<transport::UniqueFd>(fd);
  auto created = std::make_shared<Peer>();
  created->id = next_peer_.fetch_add(1);
  created->role = PeerRole::claimant;
  created->epoch = epoch;
  created->name = std::move(name);
  created->address = std::move(address);
  created->layout_template = std::move(geometry);
  created->reach = Reach::to_claimant(std::move(ucx_address), same_host);
  post([this, created, holder] {
    peers_[created->id] = created;
    connect(created, holder->release());
  });
  return created->id;
}

void Engine::connect(const PeerPtr& connected, int fd) {
  connected->channel = std::make_unique<Channel>(fd);
  connected->state = PeerState::ready;
  try {
    poller_.watch(fd, connected->id);
  } catch (const Error& error) {
    lose(connected, {error.code(), error.what()});
  }
}

void Engine::fail_peer(std::uint64_t id, Failure failure) {
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
                         .transports = each->reach.transports(),
                         .handoffs = each->handoffs,
                         .bytes = each->bytes});
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
    throw Error(Code::invalid_argument, "the payload has " + std::to_string(options.payload.size()) + " bytes, at most " +
                                            std::to_string(kMaxPayloadBytes) + " travel with a handoff");
  }
  const std::int64_t expires_ns = deadline_after(options.ttl_ms, "ttl");
  BlockTables blocks = entries_between(options.blocks, services_.holds->groups(), 0, options.num_tokens);
  admit_one();
  try {
    services_.holds->acquire_shared(blocks);
  } catch (...) {
    services_.counters.live.fetch_sub(1);
    throw;
  }
  services_.counters.offers.fetch_add(1);
  const AttemptId id{.handoff = {.epoch = services_.epoch, .sequence = next_sequence_.fetch_add(1)}, .attempt = 0};
  auto handle =
      std::make_shared<Handoff>(Role::offer, id, std::move(options.label), State::offered, services_.bells);
  const std::lock_guard lock(mutex_);  // So that no offer slips in behind the sweep of `close`.
  if (closed_) {
    services_.holds->release_shared(blocks);
    services_.counters.live.fetch_sub(1);
    throw Error(Code::closed, "the node is closed");
  }
  offers_.add({.handle = handle,
               .blocks = std::move(blocks),
               .num_tokens = options.num_tokens,
               .expires_ns = expires_ns,
               .readers = options.readers,
               .payload = std::move(options.payload)});
  return handle;
}

std::shared_ptr<Handoff> Engine::pull(std::uint64_t peer_id, PullOptions options) {
  if (options.skip_tokens > options.num_tokens) {
    throw Error(Code::invalid_argument, "skip_tokens is " + std::to_string(options.skip_tokens) + ", the handoff has " +
                                            std::to_string(options.num_tokens) + " tokens");
  }
  const std::int64_t deadline_ns = deadline_after(options.deadline_ms, "deadline");
  BlockTables written =
      entries_between(options.blocks, services_.holds->groups(), options.skip_tokens, options.num_tokens);
  admit_one();
  try {
    services_.holds->acquire_exclusive(written);
  } catch (...) {
    services_.counters.live.fetch_sub(1);
    throw;
  }
  services_.counters.pulls.fetch_add(1);
  const AttemptId id{.handoff = options.id, .attempt = next_attempt_.fetch_add(1)};
  auto handle = std::make_shared<Handoff>(Role::pull, id, std::move(options.label), State::connecting, services_.bells);
  auto request = std::make_shared<PullRequest>(PullRequest{.handle = handle,
                                                           .blocks = std::move(options.blocks),
                                                           .written = written,
                                                           .num_tokens = options.num_tokens,
                                                           .skip_tokens = options.skip_tokens,
                                                           .submitted_ns = now_ns(),
                                                           .deadline_ns = deadline_ns,
                                                           .lane = options.lane});
  try {
    post([this, peer_id, request] {
      PeerPtr found = peer(peer_id);
      if (!found) {
        found = std::make_shared<Peer>();
        found->state = PeerState::lost;
        found->lost = Failure{Code::peer_lost, "the connection to the source is gone"};
      }
      pulls_.submit(std::move(*request), found);
    });
  } catch (...) {
    services_.holds->release_exclusive(written);
    services_.counters.live.fetch_sub(1);
    throw;
  }
  return handle;
}

void Engine::cancel(const std::shared_ptr<Handoff>& handle) {
  if (handle->has_outcome()) return;
  post([this, handle] {
    const Failure failure{Code::cancelled, "cancelled by its owner"};
    if (handle->role() == Role::offer) {
      offers_.cancel(handle->id().handoff, failure);
    } else {
      pulls_.cancel(handle->id(), failure);
    }
  });
}

PeerPtr Engine::peer(std::uint64_t id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

// The loop, on the progress thread.

void Engine::run() noexcept {
  block_signals();
  ::pthread_setname_np(::pthread_self(), "kvlink-progress");
  while (!stop_) {
    const bool busy = turn();
    if (drain_until_ns_ != 0 && ((pulls_.drained() && offers_.drained()) || now_ns() >= drain_until_ns_)) break;
    sleep_or_spin(busy);
  }
  finish_thread();
}

bool Engine::turn() noexcept {
  bool busy = run_tasks();
  if (services_.ucx) busy = services_.ucx->progress() != 0 || busy;
  const std::int64_t now = now_ns();
  busy = offers_.turn(now) || busy;
  busy = pulls_.turn(now) || busy;
  drop_lost();
  flush_channels();
  return busy;
}

bool Engine::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
  return !tasks.empty();
}

std::int64_t Engine::sleep_ns(std::int64_t now) noexcept {
  const std::int64_t deadline = std::min(offers_.next_deadline(), pulls_.next_deadline());
  const std::int64_t until = drain_until_ns_ == 0 ? deadline : std::min(deadline, drain_until_ns_);
  return until == std::numeric_limits<std::int64_t>::max() ? kLongestSleepNs
                                                            : std::clamp<std::int64_t>(until - now, 0, kLongestSleepNs);
}

void Engine::sleep_or_spin(bool busy) {
  const std::int64_t now = now_ns();
  if (busy) busy_until_ns_ = now + kSpinNs;
  const bool spin = now < busy_until_ns_ || (services_.ucx && !services_.ucx->arm());
  for (const transport::Poller::Ready& ready : poller_.wait(spin ? 0 : sleep_ns(now))) {
    if (ready.token == kWakerToken) services_.waker.clear();
    if (ready.token < kFirstPeer) continue;
    busy_until_ns_ = now_ns() + kSpinNs;
    const PeerPtr found = peer(ready.token);
    if (found && found->channel && ready.readable) serve(found);
  }
}

void Engine::serve(const PeerPtr& served) {
  const bool alive = served->channel->receive([&](const Header& header, std::span<const std::byte> body) {
    if (!served->lost) dispatch(served, header, body);
  });
  if (!alive && !served->lost) {
    served->lost = Failure{Code::peer_lost, served->channel->why()};
  }
}

void Engine::dispatch(const PeerPtr& from, const Header& header, std::span<const std::byte> body) {
  const AttemptId& attempt = header.attempt;
  const bool reads_us = from->role == PeerRole::claimant;
  const auto bad = [&](const char* what) {
    services_.counters.protocol_errors.fetch_add(1);
    from->lost = Failure{Code::protocol_error, std::string("the peer sent a malformed ") + what};
  };
  const bool for_source = header.kind == Kind::claim || header.kind == Kind::fetch || header.kind == Kind::credit ||
                          header.kind == Kind::confirm || header.kind == Kind::cancel;
  if (for_source != reads_us) return bad("message: it is not its part to send it");
  switch (header.kind) {
    case Kind::claim:
      if (const auto claim = parse_claim(body)) return offers_.on_claim(from, attempt, *claim);
      return bad("CLAIM");
    case Kind::fetch:
      if (const auto fetch = parse_fetch(body)) return offers_.on_fetch(from, attempt, *fetch);
      return bad("FETCH");
    case Kind::credit:
      if (const auto chunks = parse_number(body)) return offers_.on_credit(from, attempt, *chunks);
      return bad("CREDIT");
    case Kind::confirm:
      if (const auto bytes = parse_number(body)) return offers_.on_confirm(from, attempt, *bytes);
      return bad("CONFIRM");
    case Kind::cancel:
      return offers_.on_cancel(from, attempt);
    case Kind::grant:
      if (auto grant = parse_grant(body)) return pulls_.on_grant(from, attempt, std::move(*grant));
      return bad("GRANT");
    case Kind::refuse:
      if (const auto refuse = parse_refuse(body)) return pulls_.on_refuse(from, attempt, *refuse);
      return bad("REFUSE");
    case Kind::valid:
      return pulls_.on_valid(from, attempt);
  }
}

void Engine::lose(const PeerPtr& lost, Failure failure) {
  if (!lost->lost) lost->lost = std::move(failure);
}

void Engine::drop_lost() {
  for (auto found = peers_.begin(); found != peers_.end();) {
    const PeerPtr each = found->second;
    if (!each->lost) {
      ++found;
      continue;
    }
    each->state = PeerState::lost;
    pulls_.on_peer_lost(each);
    offers_.on_peer_lost(each);
    if (each->channel) {
      (void)each->channel->flush();  // So that the peer still learns why, if it listens.
      poller_.forget(each->channel->fd());
      each->channel.reset();
    }
    each->reach.close();
    found = peers_.erase(found);
  }
}

void Engine::flush_channels() {
  for (const auto& [id, each] : peers_) {
    if (!each->channel || each->channel->outbox().empty()) continue;
    if (!each->channel->flush()) lose(each, {Code::peer_lost, each->channel->why()});
    poller_.want_writable(each->channel->fd(), id, each->channel->wants_writable());
  }
}

void Engine::finish_thread() {
  flush_channels();
  // Order matters: nothing may write this node's memory once its blocks are called released.
  services_.copy_threads.reset();
  for (const auto& [id, each] : peers_) {
    lose(each, {Code::closed, "the node was closed"});
  }
  drop_lost();
  pulls_.release_all();
  registrations_.clear();
  if (services_.ucx) poller_.forget(services_.ucx->event_fd());
  services_.ucx.reset();
  services_.bells->ring();
}

}  // namespace kvlink::handoff
