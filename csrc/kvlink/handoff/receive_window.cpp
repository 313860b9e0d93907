#include "kvlink/handoff/receive_window.hpp"

#include <algorithm>

namespace kvlink::handoff {
namespace {

/// Alone in a window, a part may be larger than it.
[[nodiscard]] bool fits(std::uint64_t moving, std::uint64_t bytes, std::uint64_t window) noexcept {
  return moving == 0 || (moving <= window && bytes <= window - moving);
}

}  // namespace

void ReceiveWindow::wait(std::uint64_t peer, const AttemptId& attempt, std::uint64_t bytes) {
  Peer& queue = peers_[peer];
  if (queue.waiting.empty()) turns_.push_back(peer);
  const auto place = queue.waiting.insert(queue.waiting.end(), attempt);
  parts_.emplace(attempt, Part{.peer = peer, .bytes = bytes, .place = place});
  looked_ = false;
}

std::optional<AttemptId> ReceiveWindow::next() {
  if (looked_) return std::nullopt;
  for (std::size_t left = turns_.size(); left != 0; --left) {
    const std::uint64_t id = turns_.front();
    Peer& peer = peers_.at(id);
    const AttemptId attempt = peer.waiting.front();
    Part& part = parts_.at(attempt);
    const bool has_place = moving_ < limits_.transfers || peer.moving == 0;
    const bool may_start = has_place && fits(peer.moving_bytes, part.bytes, limits_.peer_bytes);
    // It keeps its turn: where smaller ones overtook a large one, that could wait for ever.
    if (may_start && !fits(moving_bytes_, part.bytes, limits_.node_bytes)) break;
    turns_.pop_front();
    if (!may_start) {
      turns_.push_back(id);
      continue;
    }
    peer.waiting.pop_front();
    if (!peer.waiting.empty()) turns_.push_back(id);
    part.moving = true;
    peer.moving_bytes += part.bytes;
    moving_bytes_ += part.bytes;
    ++peer.moving;
    ++moving_;
    return attempt;
  }
  looked_ = true;
  return std::nullopt;
}

void ReceiveWindow::leave(const AttemptId& attempt) {
  const auto found = parts_.find(attempt);
  if (found == parts_.end()) return;
  const Part part = found->second;
  parts_.erase(found);
  looked_ = false;
  const auto peer = peers_.find(part.peer);
  if (part.moving) {
    peer->second.moving_bytes -= part.bytes;
    moving_bytes_ -= part.bytes;
    --peer->second.moving;
    --moving_;
  } else {
    peer->second.waiting.erase(part.place);
    if (peer->second.waiting.empty()) std::erase(turns_, part.peer);
  }
  if (peer->second.waiting.empty() && peer->second.moving == 0) peers_.erase(peer);
}

}  // namespace kvlink::handoff
