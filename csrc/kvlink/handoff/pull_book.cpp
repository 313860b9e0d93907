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

/// Messages to the source must never grow with its slowness, so a lost channel swallows them.
[[nodiscard]] std::vector<std::byte>* outbox(const PeerPtr& peer) {
  return peer->channel ? &peer->channel->outbox() : nullptr;
}

}  // namespace

PullBook::Pull* PullBook::find(const PeerPtr& peer, const AttemptId& attempt) {
  const auto found = pulls_.find(attempt);
  // A message for a pull of another peer, or for one that has its outcome, is stale.
  if (found == pulls_.end() || found->second.peer != peer || found->second.settled) {
    services_.counters.stale_messages.fetch_add(1);
    return nullptr;
  }
  return &found->second;
}

void PullBook::submit(PullRequest request, const PeerPtr& peer) {
  const AttemptId attempt = request.handle->id();
  deadlines_.emplace(request.deadline_ns, attempt);
  Pull& pull = pulls_.emplace(attempt, Pull{.request = std::move(request), .peer = peer}).first->second;
  ++peer->handoffs;
  if (peer->state == PeerState::lost) {
    fail(pull, peer->lost.value_or(Failure{Code::peer_lost, "the connection is gone"}));
  } else if (peer->state == PeerState::ready) {
    claim(pull);
  }
}

void PullBook::on_peer_ready(const PeerPtr& peer) {
  for (auto& [attempt, pull] : pulls_) {
    if (pull.peer == peer && !pull.settled) claim(pull);
  }
}

void PullBook::claim(Pull& pull) {
  const auto& lanes = pull.peer->reach.lanes();
  const std::optional<transport::Lane> required = pull.request.lane;
  if (required && std::ranges::find(lanes, *required) == lanes.end()) {
    return fail(pull, {Code::lane_unavailable, "lane '" + std::string(transport::lane_name(*required)) +
                                                   "' is required: " + pull.peer->reach.why_not(*required)});
  }
  pull.lane = required.value_or(lanes.front());
  pull.claimed_ns = now_ns();
  const std::int64_t left_ms = std::max<std::int64_t>(0, (pull.request.deadline_ns - pull.claimed_ns) / kNsPerMs);
  pull.request.handle->set_state(State::claiming);
  write_claim(*outbox(pull.peer), pull.request.handle->id(),
              {.lane = pull.lane,
               .first_token = pull.request.skip_tokens,
               .end_token = pull.request.num_tokens,
               .remaining_ms = static_cast<std::uint32_t>(std::min<std::int64_t>(left_ms, UINT32_MAX))});
}

std::shared_ptr<const plan::Plan> PullBook::plan_of(const Pull& pull, const Grant& grant) const {
  const plan::Template& geometry = *pull.peer->layout_template;
  std::vector<plan::GroupTables> tables;
  for (const plan::GroupGeometry& group : geometry.groups()) {
    if (group.source_index >= grant.blocks.size()) {
      throw Error(Code::protocol_error, "the grant has no block table for group '" + group.name + "'");
    }
    tables.push_back({.source = grant.blocks[group.source_index], .target = pull.request.blocks[group.target_index]});
  }
  return std::make_shared<plan::Plan>(
      pull.peer->layout_template,
      plan::pair_groups(geometry, tables, pull.request.skip_tokens, pull.request.num_tokens));
}

void PullBook::on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant) {
  Pull* const pull = find(peer, attempt);
  if (pull == nullptr) return;
  if (pull->granted_ns != 0) return fail(*pull, {Code::protocol_error, "the source granted one claim twice"});
  pull->granted_ns = now_ns();
  try {
    if (grant.num_tokens != pull->request.num_tokens) {
      throw Error(Code::protocol_error, "the ticket says " + std::to_string(pull->request.num_tokens) +
                                            " tokens, the source granted " + std::to_string(grant.num_tokens));
    }
    pull->plan = plan_of(*pull, grant);
  } catch (const Error& error) {
    return fail(*pull, {error.code(), error.what()});
  }
  pull->payload = std::move(grant.payload);
  if (pull->plan->total_bytes() == 0) return confirm(*pull);
  pull->request.handle->set_state(State::waiting);
  waiting_.push_back(attempt);
  admit();
}

void PullBook::admit() {
  while (!waiting_.empty() && moving_.size() < kMovingLimit) {
    const auto found = pulls_.find(waiting_.front());
    waiting_.pop_front();
    if (found != pulls_.end() && !found->second.settled) start(found->second);
  }
}

void PullBook::start(Pull& pull) {
  const AttemptId& attempt = pull.request.handle->id();
  try {
    auto started = pull.peer->reach.make_transfer(pull.lane, pull.plan, services_, pull.peer->title());
    pull.transfer = std::move(started.transfer);
    pull.receiver = std::move(started.receiver);
  } catch (const Error& error) {
    return fail(pull, {error.code(), error.what()});
  }
  pull.started_ns = now_ns();
  pull.request.handle->set_state(State::moving);
  moving_.push_back(attempt);
  if (pull.receiver) services_.router->attach(attempt, pull.receiver);
  pull.transfer->start();
  if (pull.receiver && outbox(pull.peer) != nullptr) write_fetch(*outbox(pull.peer), attempt, fetch_of_plan(*pull.plan));
}

bool PullBook::advance(Pull& pull) {
  const bool busy = pull.transfer->advance();
  if (pull.receiver && !pull.settled) {
    const std::uint32_t credits = pull.receiver->take_credits();
    if (credits != 0 && outbox(pull.peer) != nullptr) {
      write_number(*outbox(pull.peer), Kind::credit, pull.request.handle->id(), credits);
    }
  }
  return busy;
}

void PullBook::finish(Pulls::iterator found) {
  Pull& pull = found->second;
  if (pull.receiver) services_.router->detach(found->first);
  pull.moved_ns = now_ns();
  if (pull.settled) {  // Failed earlier; now nothing writes its blocks any more.
    services_.holds->release_exclusive(pull.request.written);
    pull.request.handle->release();
    pulls_.erase(found);
    return;
  }
  if (const auto failure = pull.transfer->failure()) return fail(pull, *failure);
  if (pull.transfer->moved_bytes() != pull.plan->total_bytes()) {
    return fail(pull, {Code::transport_failed, "the lane ended after " + std::to_string(pull.transfer->moved_bytes()) +
                                                   " of " + std::to_string(pull.plan->total_bytes()) + " bytes"});
  }
  confirm(pull);
}

void PullBook::confirm(Pull& pull) {
  pull.confirming = true;
  pull.request.handle->set_state(State::confirming);
  if (outbox(pull.peer) != nullptr) {
    write_number(*outbox(pull.peer), Kind::confirm, pull.request.handle->id(), pull.plan->total_bytes());
  }
}

void PullBook::on_valid(const PeerPtr& peer, const AttemptId& attempt) {
  Pull* const pull = find(peer, attempt);
  if (pull == nullptr) return;
  if (!pull->confirming) return fail(*pull, {Code::protocol_error, "VALID came before CONFIRM"});
  succeed(*pull);
}

void PullBook::on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse) {
  Pull* const pull = find(peer, attempt);
  if (pull != nullptr) fail(*pull, {refuse.code, refuse.message});
}

void PullBook::on_peer_lost(const PeerPtr& peer) {
  std::vector<AttemptId> affected;
  for (const auto& [attempt, pull] : pulls_) {
    if (pull.peer == peer && !pull.settled) affected.push_back(attempt);
  }
  for (const AttemptId& attempt : affected) {
    fail(pulls_.at(attempt), peer->lost.value_or(Failure{Code::peer_lost, "the connection is gone"}));
  }
}

Result PullBook::result_of(const Pull& pull) const {
  const std::int64_t now = now_ns();
  const double post = pull.transfer ? static_cast<double>(pull.transfer->post_ns()) * 1e-9 : 0.0;
  return {.failure = {},
          .failed = {},
          .valid_prefix_tokens = pull.request.num_tokens,
          .bytes = pull.plan ? pull.plan->total_bytes() : 0,
          .lane = std::string(transport::lane_name(pull.lane)),
          .phases_s = {{"connect", seconds(pull.request.submitted_ns, pull.claimed_ns)},
                       {"claim", seconds(pull.claimed_ns, pull.granted_ns)},
                       {"post", post},
                       {"move", seconds(pull.started_ns, pull.moved_ns)},
                       {"confirm", seconds(pull.moved_ns != 0 ? pull.moved_ns : pull.granted_ns, now)},
                       {"total", seconds(pull.request.submitted_ns, now)}},
          .payload = pull.payload};
}

void PullBook::succeed(Pull& pull) {
  const auto handle = pull.request.handle;
  Result result = result_of(pull);
  pull.peer->bytes += result.bytes;
  services_.counters.bytes_pulled.fetch_add(result.bytes);
  services_.counters.succeeded.fetch_add(1);
  services_.counters.live.fetch_sub(1);
  services_.holds->release_exclusive(pull.request.written);
  deadlines_.erase({pull.request.deadline_ns, handle->id()});
  pulls_.erase(handle->id());
  handle->settle(std::move(result));
  handle->release();
}

void PullBook::fail(Pull& pull, const Failure& failure) {
  const auto handle = pull.request.handle;
  const AttemptId attempt = handle->id();
  pull.settled = true;
  deadlines_.erase({pull.request.deadline_ns, attempt});
  services_.counters.failed.fetch_add(1);
  services_.counters.live.fetch_sub(1);
  Result result = result_of(pull);
  result.failure = Failure{failure.code, "pull " + text_of(attempt.handoff) + " from " + pull.peer->title() + ": " +
                                             failure.message};
  result.bytes = 0;
  result.payload.clear();
  // Without VALID no byte that was read may be called right, so only what the caller had before counts (P1, P4).
  result.valid_prefix_tokens = pull.request.skip_tokens;
  if (pull.plan) {
    for (const plan::FailedRange& range : pull.plan->describe({0, pull.plan->total_bytes()})) {
      result.failed.push_back({.group = pull.plan->geometry().groups()[range.group].name,
                               .layer = range.layer,
                               .component = std::string(plan::component_name(range.component)),
                               .first_token = range.first_token,
                               .end_token = range.end_token});
    }
  }
  if (pull.claimed_ns != 0 && outbox(pull.peer) != nullptr) write_empty(*outbox(pull.peer), Kind::cancel, attempt);
  const bool writes = pull.transfer && !pull.transfer->drained();
  if (writes) {
    pull.transfer->cancel();  // `finish` releases the blocks once it has drained.
  } else {
    if (pull.receiver) services_.router->detach(attempt);
    services_.holds->release_exclusive(pull.request.written);
    pulls_.erase(attempt);
  }
  handle->settle(std::move(result));
  if (!writes) handle->release();
}

void PullBook::cancel(const AttemptId& attempt, const Failure& failure) {
  const auto found = pulls_.find(attempt);
  if (found != pulls_.end() && !found->second.settled) fail(found->second, failure);
}

void PullBook::close_all(const Failure& failure) {
  while (!deadlines_.empty()) cancel(deadlines_.begin()->second, failure);
}

void PullBook::release_all() {
  for (auto& [attempt, pull] : pulls_) {
    services_.holds->release_exclusive(pull.request.written);
    pull.request.handle->release();
  }
  pulls_.clear();
  moving_.clear();
}

bool PullBook::turn(std::int64_t now) noexcept {
  bool busy = false;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const AttemptId attempt = deadlines_.begin()->second;
    const std::string state = state_name(pulls_.at(attempt).request.handle->state());
    cancel(attempt, {Code::deadline_exceeded, "the deadline passed while the pull was " + state});
    busy = true;
  }
  std::vector<AttemptId> turns;
  turns.swap(moving_);
  for (const AttemptId& attempt : turns) {
    const auto found = pulls_.find(attempt);
    if (found == pulls_.end() || !found->second.transfer) continue;
    busy = advance(found->second) || busy;
    if (found->second.transfer->drained()) {
      finish(found);
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
