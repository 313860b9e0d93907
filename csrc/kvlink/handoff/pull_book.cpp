#include "kvlink/handoff/pull_book.hpp"

#include <algorithm>
#include <limits>

namespace kvlink::handoff {
PullBook::PartPtr PullBook::find(const AttemptId& attempt) const {
  const auto found = parts_.find(attempt);
  return found == parts_.end() ? nullptr : found->second;
}

void PullBook::submit(PullRequest request) {
  const auto pull = std::make_shared<Pull>(Pull{.request = std::move(request)});
  const AttemptId id = pull->request.handle->id();
  pull->parts_unmoved = pull->parts_invalid = pull->parts_live = pull->request.parts.size();
  deadlines_.emplace(pull->request.deadline_ns, id);
  pulls_.emplace(id, pull);
  for (const PartRequest& part : pull->request.parts) {
    ++part.peer->handoffs;
    const auto made = std::make_shared<Part>();
    made->pull = pull;
    made->attempt = part.attempt;
    made->peer = part.peer;
    made->first = part.attempt == id;
    if (pull->request.is_reservation) made->at = At::reserved;
    parts_.emplace(part.attempt, made);
  }
  if (pull->request.is_reservation) reservations_.add(id.handoff, id);
  step_pull(pull, On::submit);
}

void PullBook::on_peer_ready(const PeerPtr& peer) {
  std::vector<PartPtr> affected;
  for (const auto& [attempt, part] : parts_) {
    if (part->peer == peer) affected.push_back(part);
  }
  for (const PartPtr& part : affected) step_part(part, On::ready, {.peer = peer});
}

void PullBook::on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant) {
  const Failure untrue{Code::protocol_error, "the source granted one claim twice, or one that was not made"};
  step_part(find(attempt), On::grant, {.peer = peer, .grant = &grant, .failure = untrue});
}

void PullBook::on_valid(const PeerPtr& peer, const AttemptId& attempt) {
  step_part(find(attempt), On::valid,
            {.peer = peer, .failure = Failure{Code::protocol_error, "VALID came without CONFIRM"}});
}

void PullBook::on_sums(const PeerPtr& peer, const AttemptId& attempt, const Sums& sums) {
  const Failure unasked{Code::protocol_error, "the source sent sums that were not asked for"};
  step_part(find(attempt), On::sums, {.peer = peer, .sums = &sums, .failure = unasked});
}

void PullBook::on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse) {
  step_part(find(attempt), On::refuse, {.peer = peer, .failure = Failure{refuse.code, refuse.message}});
}

void PullBook::on_peer_lost(const PeerPtr& peer) {
  std::vector<PartPtr> all;  // A step may take some out.
  for (const auto& [attempt, part] : parts_) all.push_back(part);
  for (const PartPtr& part : all) step_part(part, On::peer_lost, {.peer = peer, .failure = peer->lost});
}

void PullBook::want_turns(Part& part) {
  if (part.has_turns) return;
  part.has_turns = true;
  moving_.push_back(part.attempt);
}

void PullBook::admit() {
  while (const auto attempt = window_.next()) {
    const PartPtr part = parts_.at(*attempt);  // `enter` takes out what has ended
    step_part(part, On::admit, {.peer = part->peer});
  }
}

bool PullBook::advance(Part& part) {
  bool busy = part.transfer && part.transfer->advance();
  if (part.summing) busy = part.summing->advance() || busy;
  if (part.converting) busy = part.converting->advance() || busy;
  if (part.receiver && part.at == At::moving) {
    const std::uint32_t credits = part.receiver->take_credits();
    if (credits != 0 && part.peer->channel) {
      write_number(part.peer->channel->outbox(), Kind::credit, part.attempt, credits);
    }
  }
  return busy;
}

void PullBook::cancel(const AttemptId& handle, const Failure& failure) {
  const auto found = pulls_.find(handle);
  if (found == pulls_.end()) return;
  const PullPtr pull = found->second;
  const Cause cause{pull->request.parts.front().peer, failure};
  step_pull(pull, On::cancel, &cause);
}

void PullBook::close_all(const Failure& failure) {
  while (!deadlines_.empty()) {
    const PullPtr pull = pulls_.at(deadlines_.begin()->second);
    const Cause cause{pull->request.parts.front().peer, failure};
    step_pull(pull, On::close, &cause);
  }
}

void PullBook::drop_transfers() {
  moving_.clear();
  for (const auto& [attempt, part] : parts_) {
    if (part->receiver) services_.router->detach(attempt);
    part->receiver.reset();
    part->transfer.reset();
    part->converting.reset();
  }
}

void PullBook::release_all() {
  std::vector<PartPtr> left;
  for (const auto& [attempt, part] : parts_) left.push_back(part);
  for (const PartPtr& part : left) step_part(part, On::threads_gone, {.peer = part->peer});
}

bool PullBook::turn(std::int64_t now) noexcept {
  bool busy = false;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const PullPtr pull = pulls_.at(deadlines_.begin()->second);
    const std::string state = state_name(pull->request.handle->state());
    const Cause cause{pull->request.parts.front().peer,
                      {Code::deadline_exceeded, "the deadline passed while the pull was " + state}};
    step_pull(pull, On::deadline, &cause);
    busy = true;
  }
  std::vector<AttemptId> turns;
  turns.swap(moving_);
  for (const AttemptId& attempt : turns) {
    const PartPtr part = find(attempt);
    if (!part) continue;
    part->has_turns = false;
    busy = advance(*part) || busy;
    step_part(part, On::turn, {.peer = part->peer});
    if (kTurning.has(part->at)) {
      want_turns(*part);
    } else {
      busy = true;
    }
  }
  admit();
  return heartbeat_.turn(now) || busy;
}

std::int64_t PullBook::next_deadline() const noexcept {
  const std::int64_t deadline =
      deadlines_.empty() ? std::numeric_limits<std::int64_t>::max() : deadlines_.begin()->first;
  return std::min(deadline, heartbeat_.next_tick());
}

}  // namespace kvlink::handoff
