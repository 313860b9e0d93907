#include "kvlink/handoff/pull_book.hpp"

#include <algorithm>
#include <limits>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/source_plan.hpp"
#include "kvlink/plan/block_pairs.hpp"

namespace kvlink::handoff {
namespace {

/// Transfers that move at once. More would only share the same copy threads and thrash their caches.
constexpr std::size_t kMovingLimit = 16;

[[nodiscard]] double seconds(std::int64_t from, std::int64_t to) noexcept {
  return from == 0 || to == 0 ? 0.0 : static_cast<double>(to - from) * 1e-9;
}

[[nodiscard]] std::vector<std::byte>* outbox(const PeerPtr& peer) {
  return peer->channel ? &peer->channel->outbox() : nullptr;
}

}  // namespace

PullBook::Part* PullBook::find(const PeerPtr& peer, const AttemptId& attempt) {
  const auto found = parts_.find(attempt);
  // A message for a part of another peer, or for a pull that has its outcome, is stale.
  if (found == parts_.end() || found->second.peer != peer || found->second.pull->settled) {
    services_.counters.stale_messages.fetch_add(1);
    return nullptr;
  }
  return &found->second;
}

void PullBook::submit(PullRequest request) {
  const auto pull = std::make_shared<Pull>(Pull{.request = std::move(request)});
  const AttemptId id = pull->request.handle->id();
  pull->parts_unmoved = pull->parts_invalid = pull->parts_live = pull->request.parts.size();
  deadlines_.emplace(pull->request.deadline_ns, id);
  pulls_.emplace(id, pull);
  for (const PartRequest& part : pull->request.parts) {
    ++part.peer->handoffs;
    parts_.emplace(part.attempt,
                   Part{.pull = pull, .attempt = part.attempt, .peer = part.peer, .first = part.attempt == id});
  }
  for (const PartRequest& part : pull->request.parts) {
    if (pull->settled) return;
    if (part.peer->state == PeerState::lost) {
      fail(pull, *part.peer, part.peer->lost.value_or(Failure{Code::peer_lost, "the connection is gone"}));
    } else if (part.peer->state == PeerState::ready) {
      claim(parts_.at(part.attempt));
    }
  }
}

void PullBook::on_peer_ready(const PeerPtr& peer) {
  std::vector<AttemptId> affected;
  for (const auto& [attempt, part] : parts_) {
    if (part.peer == peer && !part.pull->settled && !part.claimed) affected.push_back(attempt);
  }
  for (const AttemptId& attempt : affected) {
    if (Part* const part = find(peer, attempt)) claim(*part);
  }
}

void PullBook::claim(Part& part) {
  Pull& pull = *part.pull;
  const auto& lanes = part.peer->reach.lanes();
  const std::optional<transport::Lane> required = pull.request.lane;
  if (required && std::ranges::find(lanes, *required) == lanes.end()) {
    return fail(part.pull, *part.peer,
                {Code::lane_unavailable, "lane '" + std::string(transport::lane_name(*required)) +
                                             "' is required: " + part.peer->reach.why_not(*required)});
  }
  part.lane = required.value_or(lanes.front());
  part.claimed = true;
  const std::int64_t now = now_ns();
  pull.claimed_ns = now;
  const std::int64_t left_ms = std::max<std::int64_t>(0, (pull.request.deadline_ns - now) / kNsPerMs);
  pull.request.handle->set_state(State::claiming);
  write_claim(*outbox(part.peer), part.attempt,
              {.lane = part.lane,
               .first_token = pull.request.skip_tokens,
               .end_token = pull.request.num_tokens,
               .remaining_ms = static_cast<std::uint32_t>(std::min<std::int64_t>(left_ms, UINT32_MAX))});
}

std::shared_ptr<const plan::Plan> PullBook::plan_of(const Part& part, const Grant& grant) const {
  const plan::Template& geometry = *part.peer->layout_template;
  const PullRequest& request = part.pull->request;
  if (grant.num_tokens != request.num_tokens) {
    throw Error(Code::protocol_error, "the ticket says " + std::to_string(request.num_tokens) +
                                          " tokens, the source granted " + std::to_string(grant.num_tokens));
  }
  std::vector<plan::GroupTables> tables;
  for (const plan::GroupGeometry& group : geometry.groups()) {
    if (group.source_index >= grant.blocks.size()) {
      throw Error(Code::protocol_error, "the grant has no block table for group '" + group.name + "'");
    }
    tables.push_back({.source = grant.blocks[group.source_index], .target = request.blocks[group.target_index]});
  }
  return std::make_shared<plan::Plan>(part.peer->layout_template,
                                      plan::pair_groups(geometry, tables, request.skip_tokens, request.num_tokens));
}

void PullBook::on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant) {
  Part* const part = find(peer, attempt);
  if (part == nullptr) return;
  if (part->granted) return fail(part->pull, *peer, {Code::protocol_error, "the source granted one claim twice"});
  part->granted = true;
  part->pull->granted_ns = now_ns();
  try {
    part->plan = plan_of(*part, grant);
  } catch (const Error& error) {
    return fail(part->pull, *peer, {error.code(), error.what()});
  }
  if (part->first) part->pull->result.payload = std::move(grant.payload);
  if (part->plan->total_bytes() == 0) return moved(*part);
  part->pull->request.handle->set_state(State::waiting);
  waiting_.push_back(attempt);
  admit();
}

void PullBook::admit() {
  while (!waiting_.empty() && moving_.size() < kMovingLimit) {
    const auto found = parts_.find(waiting_.front());
    waiting_.pop_front();
    if (found != parts_.end() && !found->second.pull->settled) start(found->second);
  }
}

void PullBook::start(Part& part) {
  try {
    auto started = part.peer->reach.make_transfer(part.lane, part.plan, services_, part.peer->title());
    part.transfer = std::move(started.transfer);
    part.receiver = std::move(started.receiver);
  } catch (const Error& error) {
    return fail(part.pull, *part.peer, {error.code(), error.what()});
  }
  if (part.pull->started_ns == 0) part.pull->started_ns = now_ns();
  part.pull->request.handle->set_state(State::moving);
  moving_.push_back(part.attempt);
  if (part.receiver) services_.router->attach(part.attempt, part.receiver);
  part.transfer->start();
  if (part.receiver && outbox(part.peer) != nullptr) {
    write_fetch(*outbox(part.peer), part.attempt, fetch_of_plan(*part.plan));
  }
}

bool PullBook::advance(Part& part) {
  const bool busy = part.transfer->advance();
  if (part.receiver && !part.pull->settled) {
    const std::uint32_t credits = part.receiver->take_credits();
    if (credits != 0 && outbox(part.peer) != nullptr) {
      write_number(*outbox(part.peer), Kind::credit, part.attempt, credits);
    }
  }
  return busy;
}

void PullBook::finish(Part& part) {
  const PullPtr pull = part.pull;
  pull->moved_ns = now_ns();
  pull->post_ns += part.transfer->post_ns();
  if (part.receiver) services_.router->detach(part.attempt);
  if (pull->settled) return retire(parts_.find(part.attempt));  // Failed earlier; now this part writes no more.
  if (const auto failure = part.transfer->failure()) return fail(pull, *part.peer, *failure);
  if (part.transfer->moved_bytes() != part.plan->total_bytes()) {
    return fail(pull, *part.peer,
                {Code::transport_failed, "the lane ended after " + std::to_string(part.transfer->moved_bytes()) +
                                             " of " + std::to_string(part.plan->total_bytes()) + " bytes"});
  }
  moved(part);
}

void PullBook::moved(Part& part) {
  const PullPtr pull = part.pull;
  if (--pull->parts_unmoved != 0) return;
  pull->request.handle->set_state(State::confirming);
  for (const PartRequest& request : pull->request.parts) confirm(parts_.at(request.attempt));
}

void PullBook::confirm(Part& part) {
  part.confirming = true;
  if (outbox(part.peer) != nullptr) {
    write_number(*outbox(part.peer), Kind::confirm, part.attempt, part.plan->total_bytes());
  }
}

void PullBook::on_valid(const PeerPtr& peer, const AttemptId& attempt) {
  Part* const part = find(peer, attempt);
  if (part == nullptr) return;
  if (!part->confirming || part->valid) {
    return fail(part->pull, *peer, {Code::protocol_error, "VALID came without CONFIRM"});
  }
  part->valid = true;
  const PullPtr pull = part->pull;
  Result& result = pull->result;
  result.bytes += part->plan->total_bytes();
  peer->bytes += part->plan->total_bytes();
  const auto lane = std::string(transport::lane_name(part->lane));
  if (result.lane.find(lane) == std::string::npos) result.lane += (result.lane.empty() ? "" : "+") + lane;
  if (--pull->parts_invalid != 0) return;
  pull->settled = true;
  result.valid_prefix_tokens = pull->request.num_tokens;
  services_.counters.bytes_pulled.fetch_add(result.bytes);
  services_.counters.succeeded.fetch_add(1);
  settle(pull);
}

void PullBook::on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse) {
  if (Part* const part = find(peer, attempt)) fail(part->pull, *peer, {refuse.code, refuse.message});
}

void PullBook::on_peer_lost(const PeerPtr& peer) {
  std::vector<PullPtr> affected;
  for (const auto& [attempt, part] : parts_) {
    // A part that is VALID does not need its source any more.
    if (part.peer == peer && !part.pull->settled && !part.valid) affected.push_back(part.pull);
  }
  for (const PullPtr& pull : affected) {
    if (!pull->settled) {
      fail(pull, *peer, peer->lost.value_or(Failure{Code::peer_lost, "the connection is gone"}));
    }
  }
}

void PullBook::note_missing(const Part& part, Result& result) const {
  if (part.valid || !part.plan) return;
  for (const plan::FailedRange& range : part.plan->describe({0, part.plan->total_bytes()})) {
    result.failed.push_back({.group = part.plan->geometry().groups()[range.group].name,
                             .layer = part.plan->geometry().layers()[range.layer],
                             .component = std::string(plan::component_name(range.component)),
                             .first_token = range.first_token,
                             .end_token = range.end_token});
  }
}

void PullBook::fail(PullPtr pull, const Peer& culprit, const Failure& failure) {
  pull->settled = true;
  services_.counters.failed.fetch_add(1);
  Result& result = pull->result;
  result.failure = Failure{failure.code, "pull " + text_of(pull->request.handle->id().handoff) + " from " +
                                             culprit.title() + ": " + failure.message};
  result.bytes = 0;
  result.payload.clear();
  // Without VALID no byte that was read may be called right, so only what the caller had before counts (P1, P4).
  result.valid_prefix_tokens = pull->request.skip_tokens;
  for (const PartRequest& request : pull->request.parts) {
    const Part& part = parts_.at(request.attempt);
    if (part.claimed && result.lane.empty()) result.lane = transport::lane_name(part.lane);
    note_missing(part, result);
    if (part.claimed && !part.valid && outbox(part.peer) != nullptr) {
      write_empty(*outbox(part.peer), Kind::cancel, part.attempt);
    }
  }
  settle(pull);
}

void PullBook::settle(PullPtr pull) {
  const auto handle = pull->request.handle;
  const std::int64_t now = now_ns();
  const std::int64_t moved_ns = pull->moved_ns != 0 ? pull->moved_ns : pull->granted_ns;
  pull->result.phases_s = {{"connect", seconds(pull->request.submitted_ns, pull->claimed_ns)},
                           {"claim", seconds(pull->claimed_ns, pull->granted_ns)},
                           {"post", static_cast<double>(pull->post_ns) * 1e-9},
                           {"move", seconds(pull->started_ns, pull->moved_ns)},
                           {"confirm", seconds(moved_ns, now)},
                           {"total", seconds(pull->request.submitted_ns, now)}};
  services_.counters.live.fetch_sub(1);
  deadlines_.erase({pull->request.deadline_ns, handle->id()});
  for (const PartRequest& request : pull->request.parts) {
    const auto part = parts_.find(request.attempt);
    if (part->second.transfer) part->second.transfer->cancel();
    // One that still writes rings the bell when it stops, and `finish` retires it then.
    if (!part->second.transfer || part->second.transfer->drained()) retire(part);
  }
  // Last, so that who sees the outcome sees the blocks free too, if they are.
  handle->settle(std::move(pull->result));
  if (pull->parts_live == 0) handle->release();
}

void PullBook::retire(Parts::iterator part) {
  const PullPtr pull = part->second.pull;
  if (part->second.receiver) services_.router->detach(part->first);
  parts_.erase(part);
  if (--pull->parts_live != 0) return;
  services_.holds->release_exclusive(pull->request.written);
  pulls_.erase(pull->request.handle->id());
  if (pull->request.handle->has_outcome()) pull->request.handle->release();
}

void PullBook::cancel(const AttemptId& handle, const Failure& failure) {
  const auto found = pulls_.find(handle);
  if (found == pulls_.end() || found->second->settled) return;
  const PullPtr pull = found->second;
  fail(pull, *pull->request.parts.front().peer, failure);
}

void PullBook::close_all(const Failure& failure) {
  while (!deadlines_.empty()) cancel(deadlines_.begin()->second, failure);
}

void PullBook::drop_transfers() {
  moving_.clear();
  for (auto& [attempt, part] : parts_) {
    if (part.receiver) services_.router->detach(attempt);
    part.receiver.reset();
    part.transfer.reset();
  }
}

void PullBook::release_all() {
  while (!parts_.empty()) retire(parts_.begin());
}

bool PullBook::turn(std::int64_t now) noexcept {
  bool busy = false;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const AttemptId id = deadlines_.begin()->second;
    const std::string state = state_name(pulls_.at(id)->request.handle->state());
    cancel(id, {Code::deadline_exceeded, "the deadline passed while the pull was " + state});
    busy = true;
  }
  std::vector<AttemptId> turns;
  turns.swap(moving_);
  for (const AttemptId& attempt : turns) {
    const auto found = parts_.find(attempt);
    if (found == parts_.end()) continue;
    busy = advance(found->second) || busy;
    if (found->second.transfer->drained()) {
      finish(found->second);
      busy = true;
    } else {
      moving_.push_back(attempt);
    }
  }
  admit();
  return busy;
}

std::int64_t PullBook::next_deadline() const noexcept {
  return deadlines_.empty() ? std::numeric_limits<std::int64_t>::max() : deadlines_.begin()->first;
}

}  // namespace kvlink::handoff
