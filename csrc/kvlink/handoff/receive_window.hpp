// Which granted parts may move now: bytes under way stay inside a budget, and no peer waits behind another's queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>

#include "kvlink/ids.hpp"

namespace kvlink::handoff {

/// What may be under way at once, counted by the bytes of whole transfers.
struct WindowLimits {
  std::uint64_t peer_bytes{std::uint64_t{1} << 40U};
  std::uint64_t node_bytes{std::uint64_t{1} << 40U};
  /// More would only share the same copy threads and thrash their caches. A peer of which nothing moves may always
  /// start one: else those that stand still could keep all others out.
  std::size_t transfers{16};
};

/// Peers take turns; each one's parts start in the order in which they came. A part that is larger than a window moves
/// when nothing else does in it, so nothing waits for ever. Progress thread only.
class ReceiveWindow {
 public:
  explicit ReceiveWindow(const WindowLimits& limits) : limits_(limits) {}

  void wait(std::uint64_t peer, const AttemptId& attempt, std::uint64_t bytes);
  /// The part that may start now, which counts as moving until it leaves; none if all have to wait.
  [[nodiscard]] std::optional<AttemptId> next();
  /// The part neither waits nor moves any more. Harmless for one that does not.
  void leave(const AttemptId& attempt);

  [[nodiscard]] std::uint64_t moving_bytes() const noexcept { return moving_bytes_; }

 private:
  struct Peer {
    std::list<AttemptId> waiting;
    std::uint64_t moving_bytes{};
    std::size_t moving{};
  };
  struct Part {
    std::uint64_t peer{};
    std::uint64_t bytes{};
    bool moving{false};
    std::list<AttemptId>::iterator place;  // in its peer's queue, while it waits
  };

  const WindowLimits limits_;
  std::unordered_map<std::uint64_t, Peer> peers_;
  std::map<AttemptId, Part> parts_;
  std::deque<std::uint64_t> turns_;  // the peers of which something waits, the next one first
  std::uint64_t moving_bytes_{0};
  std::size_t moving_{0};
  bool looked_{false};  // nothing has changed since `next` found nothing
};

}  // namespace kvlink::handoff
