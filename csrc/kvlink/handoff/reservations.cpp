#include "kvlink/handoff/reservations.hpp"

namespace kvlink::handoff {

void Reservations::end(const HandoffId& id, const std::optional<Failure>& why) {
  if (live_.erase(id) == 0) return;
  ended_[id] = why ? std::optional(why->code) : std::nullopt;
  order_.push_back(id);
  if (order_.size() <= kRemembered) return;
  ended_.erase(order_.front());
  order_.pop_front();
}

std::optional<AttemptId> Reservations::find(const HandoffId& id) const {
  const auto found = live_.find(id);
  return found == live_.end() ? std::nullopt : std::optional(found->second);
}

Failure Reservations::why_gone(const HandoffId& id, const Epoch& own) const {
  if (id.epoch != own) {
    return {Code::stale_peer, "the reservation is of another life of this node: reserve again"};
  }
  const auto found = ended_.find(id);
  if (found == ended_.end()) return {Code::unknown_handoff, "no such reservation is known here, or not any more"};
  if (!found->second) return {Code::already_claimed, "the reservation was pushed to already; reserve again"};
  switch (*found->second) {
    case Code::deadline_exceeded:
      return {Code::ticket_expired, "the reservation's time ran out; reserve again, or with a longer ttl_s"};
    case Code::cancelled:
      return {Code::cancelled, "the reservation was cancelled"};
    default:
      return {Code::unknown_handoff, "the reservation has failed; reserve again"};
  }
}

}  // namespace kvlink::handoff
