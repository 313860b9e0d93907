// Which reservations this node has, and why the latest of them ended.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <optional>

#include "kvlink/error.hpp"
#include "kvlink/ids.hpp"

namespace kvlink::handoff {

/// Progress thread only.
class Reservations {
 public:
  /// `handle`: the attempt by which its handle is known, whoever pushes to it.
  void add(const HandoffId& id, const AttemptId& handle) { live_.emplace(id, handle); }
  /// `why`: none if it succeeded. Nothing, if it is no reservation.
  void end(const HandoffId& id, const std::optional<Failure>& why);

  /// The handle's attempt of one without an outcome.
  [[nodiscard]] std::optional<AttemptId> find(const HandoffId& id) const;
  /// Why a push to one that is not there is declined. `own`: this node's epoch.
  [[nodiscard]] Failure why_gone(const HandoffId& id, const Epoch& own) const;

 private:
  /// Later ones are told that theirs is not known.
  static constexpr std::size_t kRemembered = 4096;

  std::map<HandoffId, AttemptId> live_;
  std::map<HandoffId, std::optional<Code>> ended_;  // bounded
  std::deque<HandoffId> order_;                     // oldest first
};

}  // namespace kvlink::handoff
