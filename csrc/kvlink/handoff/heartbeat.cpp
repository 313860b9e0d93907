#include "kvlink/handoff/heartbeat.hpp"

#include <algorithm>
#include <vector>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/messages.hpp"

namespace kvlink::handoff {
namespace {

/// However short a lease is, a peer gets no more than a hundred frames a second.
constexpr std::int64_t kShortestTickNs = 10 * kNsPerMs;

}  // namespace

std::int64_t Heartbeat::due(const HeldLease& lease) noexcept {
  if (lease.until_ns >= lease.deadline_ns) return kNever;
  // A third of the lease after it was asked for: two frames may be late.
  return lease.until_ns - lease.lease_ns + std::max(kShortestTickNs, lease.lease_ns / 3);
}

std::int64_t Heartbeat::due(const Leases& leases) noexcept {
  std::int64_t soonest = kNever;
  for (const auto& [attempt, lease] : leases) soonest = std::min(soonest, due(lease));
  return soonest;
}

void Heartbeat::hold(const PeerPtr& peer, const AttemptId& attempt, const HeldLease& lease) {
  held_[peer][attempt] = lease;
  next_tick_ = std::min(next_tick_, due(lease));
}

void Heartbeat::let_go(const PeerPtr& peer, const AttemptId& attempt) noexcept {
  const auto found = held_.find(peer);
  if (found == held_.end()) return;
  found->second.erase(attempt);
  if (found->second.empty()) held_.erase(found);
}

void Heartbeat::renew(Peer& peer, Leases& leases, std::int64_t now) {
  std::vector<Renewal> renewals;
  for (auto& [attempt, lease] : leases) {
    if (due(lease) == kNever) continue;
    const std::int64_t wanted_ns = std::max<std::int64_t>(0, lease.deadline_ns - now);
    const std::int64_t wanted_ms = std::min<std::int64_t>((wanted_ns + kNsPerMs - 1) / kNsPerMs, UINT32_MAX);
    renewals.push_back({.attempt = attempt, .lease_ms = static_cast<std::uint32_t>(wanted_ms)});
    lease.until_ns = now + std::min(lease.lease_ns, wanted_ns);
  }
  if (peer.channel && !renewals.empty()) write_renew(peer.channel->outbox(), renewals);
}

bool Heartbeat::turn(std::int64_t now) {
  if (now < next_tick_) return false;
  next_tick_ = kNever;
  for (auto& [peer, leases] : held_) {
    if (due(leases) <= now) renew(*peer, leases, now);
    next_tick_ = std::min(next_tick_, due(leases));
  }
  return true;
}

}  // namespace kvlink::handoff
