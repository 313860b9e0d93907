// The progress thread: one turn after another over tasks, UCX, timers, transfers and connections.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/engine.hpp"
#include "kvlink/signals.hpp"

namespace kvlink::handoff {
namespace {

/// A loop that was busy keeps looking for this long before it sleeps: an answer often comes within it.
constexpr std::int64_t kSpinNs = 50'000;
constexpr std::uint64_t kShortTurnNs = 100'000;  // the least that the kernel takes
constexpr std::size_t kLostRemembered = 64;
constexpr std::int64_t kLongestSleepNs = 60'000 * kNsPerMs;

/// Signals belong to the application's threads.
void block_signals() noexcept {
  const sigset_t blocked = signals_of_others();
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

/// As the kernel has it since 3.14, for which libc had no declaration for long.
struct SchedulingAttributes {
  std::uint32_t size{sizeof(SchedulingAttributes)};
  std::uint32_t policy{};
  std::uint64_t flags{};
  std::int32_t nice{};
  std::uint32_t priority{};
  std::uint64_t runtime_ns{};
  std::uint64_t deadline_ns{};
  std::uint64_t period_ns{};
};

/// Asks for turns that are short, hence soon. This thread works for microseconds at a time, and where every core is
/// busy a peer waits for it. It gains no share of the processor. Kernels before 6.12 know no such wish, and one that
/// refuses it changes nothing.
void ask_for_short_turns() noexcept {
  SchedulingAttributes attributes;
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER)
    return;
  attributes.runtime_ns = kShortTurnNs;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void Engine::run() noexcept {
  block_signals();
  ask_for_short_turns();
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
  busy = services_.private_workers.progress(poller_) != 0 || busy;
  const std::int64_t now = now_ns();
  busy = offers_.turn(now) || busy;
  busy = pulls_.turn(now) || busy;
  busy = drop_lost() || busy;
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
  const bool spin = now < busy_until_ns_ || (services_.ucx && !services_.ucx->arm()) ||
                    !services_.private_workers.arm(poller_, kUcxToken);
  const auto events = poller_.wait(spin ? 0 : sleep_ns(now));
  if (spin && events.empty()) ::sched_yield();
  for (const transport::Poller::Ready& ready : events) {
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
    const bool broken = served->channel->broken();
    if (broken) services_.counters.protocol_errors.fetch_add(1);
    served->lost = Failure{broken ? Code::protocol_error : Code::peer_lost, served->channel->why()};
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
                          header.kind == Kind::confirm || header.kind == Kind::cancel || header.kind == Kind::renew ||
                          header.kind == Kind::check || header.kind == Kind::decline;
  if (for_source != reads_us) return bad("message: it is not its part to send it");
  switch (header.kind) {
    case Kind::claim:
      if (const auto claim = parse_claim(body)) return on_claim(from, attempt, *claim);
      return bad("CLAIM");
    case Kind::check:
      if (const auto pieces = parse_pieces(body)) return offers_.on_check(from, attempt, *pieces);
      return bad("CHECK");
    case Kind::fetch:
      if (const auto fetch = parse_pieces(body)) return offers_.on_fetch(from, attempt, *fetch);
      return bad("FETCH");
    case Kind::credit:
      if (const auto chunks = parse_number(body)) return offers_.on_credit(from, attempt, *chunks);
      return bad("CREDIT");
    case Kind::confirm:
      if (const auto bytes = parse_number(body)) return offers_.on_confirm(from, attempt, *bytes);
      return bad("CONFIRM");
    case Kind::cancel:
      return offers_.on_cancel(from, attempt);
    case Kind::renew:
      if (const auto renewals = parse_renew(body)) return offers_.on_renew(from, *renewals, now_ns());
      return bad("RENEW");
    case Kind::grant:
      if (auto grant = parse_grant(body)) return pulls_.on_grant(from, attempt, std::move(*grant));
      return bad("GRANT");
    case Kind::refuse:
      if (const auto refuse = parse_refuse(body)) return pulls_.on_refuse(from, attempt, *refuse);
      return bad("REFUSE");
    case Kind::sums:
      if (const auto sums = parse_sums(body)) return pulls_.on_sums(from, attempt, *sums);
      return bad("SUMS");
    case Kind::valid:
      return pulls_.on_valid(from, attempt);
    case Kind::push:
      (void)run_tasks();  // It may be faster than the task that brings its reservation.
      if (const auto push = parse_push(body)) return pulls_.on_push(from, attempt.handoff, *push);
      return bad("PUSH");
    case Kind::ready:
      if (const auto ready = parse_ready(body)) return pulls_.on_piece(from, attempt, *ready);
      return bad("READY");
    case Kind::commit:
      if (auto payload = parse_commit(body)) return pulls_.on_commit(from, attempt, *std::move(payload));
      return bad("COMMIT");
    case Kind::decline:
      if (const auto decline = parse_refuse(body)) return offers_.on_decline(from, attempt.handoff, *decline);
      return bad("DECLINE");
  }
}

void Engine::on_claim(const PeerPtr& from, const AttemptId& attempt, const Claim& claim) {
  if (!refusing_claims_ || offers_.knows(attempt.handoff)) return offers_.on_claim(from, attempt, claim);
  services_.counters.refused_claims.fetch_add(1);
  write_refuse(from->channel->outbox(), attempt, *refusing_claims_);
}

void Engine::lose(const PeerPtr& lost, Failure failure) {
  if (!lost->lost) lost->lost = std::move(failure);
}

bool Engine::drop_lost() {
  bool dropped = false;
  for (auto found = peers_.begin(); found != peers_.end();) {
    const PeerPtr each = found->second;
    if (!each->lost) {
      ++found;
      continue;
    }
    each->state = PeerState::lost;
    {
      const std::lock_guard lock(mutex_);
      alive_.erase(each->id);
    }
    pulls_.on_peer_lost(each);
    offers_.on_peer_lost(each);
    if (each->channel) {
      (void)each->channel->flush();  // So that the peer still learns why, if it listens.
      poller_.forget(each->channel->fd());
      each->channel.reset();
    }
    each->reach.close();
    lost_.push_back(each);
    if (lost_.size() > kLostRemembered) lost_.pop_front();
    found = peers_.erase(found);
    dropped = true;
  }
  return dropped;
}

void Engine::flush_channels() {
  for (const auto& [id, each] : peers_) {
    if (!each->channel || (each->channel->outbox().empty() && !each->watches_writable)) continue;
    if (!each->channel->flush()) lose(each, {Code::peer_lost, each->channel->why()});
    const bool wanted = each->channel->wants_writable();
    if (wanted == each->watches_writable) continue;  // A call to the kernel that nearly no flush needs.
    each->watches_writable = wanted;
    poller_.want_writable(each->channel->fd(), id, wanted);
  }
}

void Engine::finish_thread() {
  flush_channels();
  // Order matters: nothing may write this node's memory once its blocks are called released (I14).
  services_.copy_threads.reset();
  for (const auto& [id, each] : peers_) {
    lose(each, {Code::closed, "the node was closed"});
  }
  drop_lost();
  // What UCX has begun it may go on with as long as its worker exists, which all of these keep.
  pulls_.drop_transfers();
  offers_.drop_senders();
  services_.private_workers.clear(poller_);
  if (services_.ucx) poller_.forget(services_.ucx->event_fd());
  // The last owner. It gives UCX some turns to close the endpoints, in which gets that were posted may still land.
  services_.ucx.reset();
  pulls_.release_all();
  registrations_.clear();
  services_.bells->ring();
}

PeerPtr Engine::peer(std::uint64_t id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

PeerPtr Engine::peer_or_lost(std::uint64_t id) const {
  if (PeerPtr found = peer(id)) return found;
  for (const PeerPtr& each : lost_) {
    if (each->id == id) return each;
  }
  auto lost = std::make_shared<Peer>();
  lost->state = PeerState::lost;
  lost->lost = Failure{Code::peer_lost, "the connection to the source is gone"};
  return lost;
}

}  // namespace kvlink::handoff
