// The leases that this node's pulls hold at other nodes, and the tick that renews them. Progress thread only.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>

#include "kvlink/handoff/peer.hpp"
#include "kvlink/ids.hpp"

namespace kvlink::handoff {

/// What a GRANT gave, by this node's clock and counted from when it asked: so it never takes a lease for longer than
/// the source does, which counts from receipt.
struct HeldLease {
  std::int64_t until_ns{};
  std::int64_t lease_ns{};     // what a renewal gives at least
  std::int64_t deadline_ns{};  // of the pull: nothing is needed after it
};

/// One RENEW a tick and peer, for all that is read from it. A lease that outlasts its pull is not renewed, so most
/// pulls send none.
class Heartbeat {
 public:
  void hold(const PeerPtr& peer, const AttemptId& attempt, const HeldLease& lease);
  void let_go(const PeerPtr& peer, const AttemptId& attempt) noexcept;

  /// Sends what is due. Returns whether anything was.
  bool turn(std::int64_t now);
  [[nodiscard]] std::int64_t next_tick() const noexcept { return next_tick_; }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  using Leases = std::map<AttemptId, HeldLease>;
  [[nodiscard]] static std::int64_t due(const HeldLease& lease) noexcept;
  [[nodiscard]] static std::int64_t due(const Leases& leases) noexcept;
  static void renew(Peer& peer, Leases& leases, std::int64_t now);

  std::map<PeerPtr, Leases> held_;
  std::int64_t next_tick_{kNever};  // never later than what is due; earlier after something was let go
};

}  // namespace kvlink::handoff
