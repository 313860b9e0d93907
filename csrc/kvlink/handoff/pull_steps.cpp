// How the target's rows of the table are carried out: what its guards ask for and its actions do.
#include <algorithm>
#include <cassert>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/handoff/source_plan.hpp"
#include "kvlink/plan/block_pairs.hpp"

namespace kvlink::handoff {
namespace {

[[nodiscard]] double seconds(std::int64_t from, std::int64_t to) noexcept {
  return from == 0 || to == 0 ? 0.0 : static_cast<double>(to - from) * 1e-9;
}

/// Whether the lane that a pull requires, or any, leads to the source.
[[nodiscard]] bool lane_fits(const Peer& peer, std::optional<transport::Lane> required) {
  const auto& lanes = peer.reach.lanes();
  return required ? std::ranges::find(lanes, *required) != lanes.end() : !lanes.empty();
}

[[nodiscard]] bool all_arrived(const transport::Transfer& transfer, const plan::Plan& plan) {
  return !transfer.failure() && transfer.moved_bytes() == plan.total_bytes();
}

/// What the handle shows while a part is there; nothing: what it showed before.
[[nodiscard]] std::optional<State> shown_state(At at) noexcept {
  if (at == At::claiming) return State::claiming;
  if (at == At::filling) return State::filling;
  if (at == At::waiting) return State::waiting;
  if (at == At::moving) return State::moving;
  if (at == At::checking) return State::checking;
  if (at == At::converting) return State::converting;
  return std::nullopt;
}

}  // namespace

Set<If> PullBook::guards_of(const Pull& pull) {
  Set<If> holding;
  holding.put(If::all_parts_moved, pull.parts_unmoved == 0);
  holding.put(If::all_parts_sound, pull.parts_unsound == 0);
  holding.put(If::all_parts_valid, pull.parts_invalid == 0);
  holding.put(If::all_parts_gone, pull.parts_live == 0);
  return holding;
}

Set<If> PullBook::guards_of(const Part& part, const News& news) const {
  Set<If> holding;
  holding.put(If::same_peer, part.peer == news.peer);
  if (part.at == At::connecting) holding.put(If::lane_fits, lane_fits(*part.peer, part.pull->request.lane));
  holding.put(If::has_bytes, part.plan && part.plan->total_bytes() != 0);
  const bool drained = (!part.transfer || part.transfer->drained()) && (!part.summing || part.summing->drained()) &&
                       (!part.converting || part.converting->drained());
  holding.put(If::drained, drained);
  holding.put(If::all_arrived, drained && part.transfer && all_arrived(*part.transfer, *part.plan));
  holding.put(If::sums, part.integrity != transport::Integrity::none);
  note_push_guards(part, news, holding);
  holding.put(If::sums_here,
              part.summing && part.summing->complete() && part.source_sums.size() == part.total_sum_bytes());
  holding.put(If::converts, part.peer->conversion != nullptr);
  holding.put(If::converted, part.converting && part.converting->drained() && !part.converting->failure());
  return holding;
}

void PullBook::step_pull(const PullPtr& pull, On event, const Cause* cause) {
  const Row* const row = find_row(table_, Machine::pull, pull->at, event, guards_of(*pull));
  if (row == nullptr) return;
  if (row->to != At::same) pull->at = row->to;
  if (pull->at == At::confirming) pull->request.handle->set_state(State::confirming);
  for (const Do action : row->actions) perform(action, pull, cause);
}

void PullBook::step_part(const PartPtr& part, On event, const News& news) {
  const Row* const row =
      find_row(table_, Machine::part, part ? part->at : At::none, event, part ? guards_of(*part, news) : Set<If>{});
  if (row == nullptr) return;
  if (part && row->to != At::same) enter(part, row->to);
  for (const Do action : row->actions) perform(action, part, news);
}

void PullBook::enter(const PartPtr& part, At to) {
  const PullPtr pull = part->pull;
  if (to == At::moving) part->peer->rate.begin(now_ns());
  if (part->at == At::moving) part->peer->rate.end(now_ns(), part->transfer ? part->transfer->moved_bytes() : 0);
  const bool arrived = part->at == At::moving && to != At::draining;
  if (part->at == At::checking && to != At::draining) pull->checked_ns = now_ns();
  part->at = to;
  if (const auto state = shown_state(to)) pull->request.handle->set_state(*state);
  if (to == At::valid) --pull->parts_invalid;
  if (arrived && part->transfer) {
    pull->moved_ns = now_ns();
    pull->post_ns += part->transfer->post_ns();
  }
  if (to == At::moved) {
    --pull->parts_unmoved;
    part->checked = part->summing != nullptr;
    if (part->converting) pull->converted_ns = now_ns();
    if (part->checked && !std::ranges::equal(part->source_sums, part->summing->sums())) ++pull->parts_unsound;
  }
  if ((arrived || to == At::none) && part->receiver) services_.router->detach(part->attempt);
  const bool ended = to == At::moved || to == At::none;
  if (ended) let_go_of_scratch(*part);
  // Scratch memory is inside the window, too.
  if (ended || (arrived && !part->scratch)) window_.leave(part->attempt);
  if (to == At::filling) {  // A piece has drained; the next one has a transfer of its own.
    part->transfer.reset();
    part->receiver.reset();
  }
  if (to == At::none) {
    --pull->parts_live;
    parts_.erase(part->attempt);
  }
}

void PullBook::perform(Do action, const PullPtr& pull, const Cause* cause) {
  const auto handle = pull->request.handle;
  switch (action) {
    case Do::ask_parts:
      ask_parts(pull);
      break;
    case Do::confirm_parts:
      tell_parts(pull, On::confirm);
      break;
    case Do::stop_parts:
      tell_parts(pull, On::stop);
      step_pull(pull, On::stopped, cause);
      break;
    case Do::note_success:
      note_success(*pull);
      break;
    case Do::note_failure:
      note_failure(*pull, *cause);
      break;
    case Do::quarantine:
      quarantine(*pull);
      break;
    case Do::note_corruption:
      note_corruption(*pull);
      break;
    case Do::free_exclusive:
      services_.holds->release_exclusive(pull->request.written);
      services_.quarantine.leave(handle->id());
      pulls_.erase(handle->id());
      break;
    case Do::settle:
      settle(*pull);
      break;
    case Do::release:
      handle->release();
      break;
    default:
      assert(false && "a row asks a pull for what only another machine does");
  }
}

void PullBook::perform(Do action, const PartPtr& part, const News& news) {
  switch (action) {
    case Do::send_claim:
      send_claim(*part);
      break;
    case Do::make_plan:
      make_plan(part, *news.grant);
      break;
    case Do::queue:
      window_.wait(part->peer->id, part->attempt, part->plan->total_bytes());
      admit();
      break;
    case Do::start_transfer:
      start_transfer(part);
      break;
    case Do::cancel_transfer:
      if (part->transfer) part->transfer->cancel();
      if (part->summing) part->summing->cancel();
      if (part->converting) part->converting->cancel();
      // One that still writes rings the bell when it stops; one that does not would never ring.
      step_part(part, On::turn, news);
      break;
    case Do::send_confirm:
      if (part->peer->channel) {
        write_number(part->peer->channel->outbox(), Kind::confirm, part->attempt, part->plan->total_bytes());
      }
      break;
    case Do::send_cancel:
      if (part->peer->channel) write_empty(part->peer->channel->outbox(), Kind::cancel, part->attempt);
      break;
    case Do::start_renewing: {
      const std::int64_t lease_ns = std::int64_t{news.grant->remaining_ms} * kNsPerMs;
      heartbeat_.hold(part->peer, part->attempt,
                      {.until_ns = part->claimed_ns + lease_ns,
                       .lease_ns = lease_ns,
                       .deadline_ns = part->pull->request.deadline_ns});
      break;
    }
    case Do::stop_renewing:
      heartbeat_.let_go(part->peer, part->attempt);
      break;
    case Do::count_valid: {
      Result& result = part->pull->result;
      result.bytes += part->plan->total_bytes();
      part->peer->bytes += part->plan->total_bytes();
      const auto lane = std::string(transport::lane_name(part->lane));
      if (result.lane.find(lane) == std::string::npos) result.lane += (result.lane.empty() ? "" : "+") + lane;
      break;
    }
    case Do::count_stale:
      services_.counters.stale_messages.fetch_add(1);
      break;
    case Do::tell_moved:
      step_pull(part->pull, On::moved);
      break;
    case Do::tell_valid:
      step_pull(part->pull, On::valid);
      break;
    case Do::tell_fail:
      fail(part, failure_of(*part, news));
      break;
    case Do::tell_gone:
      step_pull(part->pull, On::gone);
      break;
    default:
      perform_push(action, part, news);
  }
}

void PullBook::ask_parts(const PullPtr& pull) {
  for (const PartRequest& request : pull->request.parts) {
    const PartPtr part = find(request.attempt);
    if (!part) return;  // One failed, and the pull with it.
    if (request.peer->state == PeerState::lost) {
      step_part(part, On::peer_lost, {.peer = request.peer, .failure = request.peer->lost});
    } else if (request.peer->state == PeerState::ready) {
      step_part(part, On::ready, {.peer = request.peer});
    }
  }
}

void PullBook::tell_parts(const PullPtr& pull, On event) {
  for (const PartRequest& request : pull->request.parts) {
    if (const PartPtr part = find(request.attempt)) step_part(part, event, {.peer = request.peer});
  }
}

void PullBook::send_claim(Part& part) {
  Pull& pull = *part.pull;
  const auto& lanes = part.peer->reach.lanes();
  if (pull.request.lane || !lanes.empty()) part.lane = pull.request.lane ? *pull.request.lane : lanes.front();
  const std::int64_t now = now_ns();
  part.claimed_ns = pull.claimed_ns = now;
  const std::int64_t left_ms = std::max<std::int64_t>(0, (pull.request.deadline_ns - now) / kNsPerMs);
  write_claim(part.peer->channel->outbox(), part.attempt,
              {.lane = part.lane,
               .first_token = pull.request.skip_tokens,
               .end_token = pull.request.num_tokens,
               .remaining_ms = static_cast<std::uint32_t>(std::min<std::int64_t>(left_ms, UINT32_MAX)),
               .integrity = pull.request.integrity,
               .ranks = pull.request.ranks});
}

void PullBook::check_terms(const Part& part, const Grant& grant) const {
  const plan::Template& geometry = *part.peer->layout_template;
  const PullRequest& request = part.pull->request;
  if (grant.num_tokens != request.num_tokens) {
    throw Error(Code::protocol_error, "the ticket says " + std::to_string(request.num_tokens) +
                                          " tokens, the source granted " + std::to_string(grant.num_tokens));
  }
  if (request.integrity != transport::Integrity::none && grant.integrity != request.integrity) {
    throw Error(Code::protocol_error, "this node demands the checksum " +
                                          std::string(transport::integrity_name(request.integrity)) +
                                          ", and the source granted without it");
  }
  if (grant.integrity != transport::Integrity::none || part.lane == transport::Lane::staged) check_pieces(geometry);
}

std::vector<std::vector<plan::BlockPair>> PullBook::pairs_of(const Part& part, const Grant& grant) const {
  check_terms(part, grant);
  const plan::Template& geometry = *part.peer->layout_template;
  const PullRequest& request = part.pull->request;
  std::vector<plan::GroupTables> tables;
  for (const plan::GroupGeometry& group : geometry.groups()) {
    if (group.source_index >= grant.blocks.size()) {
      throw Error(Code::protocol_error, "the grant has no block table for group '" + group.name + "'");
    }
    tables.push_back({.source = grant.blocks[group.source_index], .target = request.blocks[group.target_index]});
  }
  return plan::pair_groups(geometry, tables, request.skip_tokens, request.num_tokens);
}

void PullBook::make_plan(const PartPtr& part, Grant& grant) {
  part->pull->granted_ns = now_ns();
  try {
    part->plan = plan_of(*part, pairs_of(*part, grant));
  } catch (const Error& error) {
    return fail(part, {error.code(), error.what()});
  }
  part->integrity = grant.integrity;
  if (part->first) part->pull->result.payload = std::move(grant.payload);
  step_part(part, On::planned, {.peer = part->peer});
}

void PullBook::start_transfer(const PartPtr& part) {
  Fetch fetch;
  try {
    auto started =
        part->peer->reach.make_transfer(part->lane, part->plan, memory_of(*part), services_, part->peer->title());
    part->transfer = std::move(started.transfer);
    part->receiver = std::move(started.receiver);
    if (part->receiver) fetch = fetch_of_plan(*part->plan);
    if (part->filling) fetch.layers = ranges_of(part->filling->layers);
    fetch.chunk_address = std::move(started.chunk_address);
  } catch (const Error& error) {
    return fail(part, {error.code(), error.what()});
  }
  if (part->pull->started_ns == 0) part->pull->started_ns = now_ns();
  want_turns(*part);
  if (part->receiver) services_.router->attach(part->attempt, part->receiver);
  part->transfer->start();
  if (part->receiver && part->peer->channel) {
    write_pieces(part->peer->channel->outbox(), Kind::fetch, part->attempt, fetch);
  }
}

Failure PullBook::failure_of(const Part& part, const News& news) {
  if (news.failure) return *news.failure;
  if (part.at == At::connecting && part.peer->state != PeerState::lost) {
    const std::optional<transport::Lane> required = part.pull->request.lane;
    if (!required) return {Code::lane_unavailable, "no lane leads to the source"};
    return {Code::lane_unavailable, "lane '" + std::string(transport::lane_name(*required)) +
                                        "' is required: " + part.peer->reach.why_not(*required)};
  }
  if (part.transfer) {
    if (auto failure = part.transfer->failure()) return *std::move(failure);
    return {Code::transport_failed, "the lane ended after " + std::to_string(part.transfer->moved_bytes()) + " of " +
                                        std::to_string(part.plan->total_bytes()) + " bytes"};
  }
  return {Code::peer_lost, "the connection is gone"};
}

void PullBook::fail(const PartPtr& part, const Failure& failure) {
  const Cause cause{part->peer, failure};
  step_pull(part->pull, On::fail, &cause);
}

void PullBook::note_success(Pull& pull) {
  pull.result.valid_prefix_tokens = pull.request.num_tokens;
  services_.counters.bytes_pulled.fetch_add(pull.result.bytes);
  services_.counters.succeeded.fetch_add(1);
}

void PullBook::quarantine(const Pull& pull) {
  std::uint64_t blocks = 0;
  for (const auto& table : pull.request.written) {
    blocks += table.size() - static_cast<std::size_t>(std::ranges::count(table, -1));
  }
  std::vector<std::string> peers;
  for (const PartRequest& request : pull.request.parts) {
    if (const PartPtr part = find(request.attempt)) peers.push_back(part->peer->title());
  }
  services_.holds->quarantine(pull.request.written);
  services_.quarantine.enter(pull.request.handle->id(), blocks, std::move(peers));
}

plan::Plan PullBook::wanted_of(const PullRequest& request, const std::shared_ptr<const plan::Template>& geometry) {
  std::vector<std::span<const std::int32_t>> tables;
  for (const plan::GroupGeometry& group : geometry->groups()) tables.emplace_back(request.blocks[group.target_index]);
  return {geometry, plan::wanted_of_groups(*geometry, tables, request.skip_tokens, request.num_tokens)};
}

void PullBook::note_missing(const plan::Template& geometry, std::span<const plan::FailedRange> ranges, Result& result) {
  for (const plan::FailedRange& range : ranges) {
    result.failed.push_back({.group = geometry.groups()[range.group].name,
                             .layer = geometry.layers()[range.layer],
                             .component = std::string(plan::component_name(range.component)),
                             .first_head = range.first_head,
                             .end_head = range.end_head,
                             .first_token = range.first_token,
                             .end_token = range.end_token});
  }
}

void PullBook::note_all_of(const plan::Plan& plan, Result& result) {
  note_missing(plan.geometry(), plan.describe({0, plan.total_bytes()}), result);
}

void PullBook::note_all_missing(const Pull& pull, Result& result) const {
  std::vector<PartPtr> parts;
  bool shares_known = true;
  for (const PartRequest& request : pull.request.parts) {
    const PartPtr part = find(request.attempt);
    if (!part || part->at == At::valid) continue;
    parts.push_back(part);
    shares_known = shares_known && part->peer->layout_template != nullptr;
  }
  if (!shares_known) {
    // Who was to bring what is elected from the layouts of all sources: until then all of it is missing.
    if (services_.own_template) note_all_of(wanted_of(pull.request, services_.own_template), result);
    return;
  }
  for (const PartPtr& part : parts) {
    const auto& geometry = part->peer->layout_template;
    if (part->checked) {
      note_missing(*geometry, differing(*part), result);
    } else {
      note_all_of(part->whole_plan() != nullptr ? *part->plan : wanted_of(pull.request, geometry), result);
    }
  }
}

void PullBook::note_failure(Pull& pull, const Cause& cause) {
  services_.counters.failed.fetch_add(1);
  Result& result = pull.result;
  result.failure = Failure{cause.failure.code, std::string(role_name(pull.request.handle->role())) + " " +
                                                   text_of(pull.request.handle->id().handoff) + " from " +
                                                   cause.culprit->title() + ": " + cause.failure.message};
  result.bytes = 0;
  result.payload.clear();
  result.valid_prefix_tokens = valid_prefix_of(pull);
  for (const PartRequest& request : pull.request.parts) {
    const PartPtr part = find(request.attempt);
    if (!part) continue;
    if (part->at != At::connecting && part->at != At::reserved && result.lane.empty())
      result.lane = transport::lane_name(part->lane);
  }
  note_all_missing(pull, result);
}

void PullBook::settle(Pull& pull) {
  const auto handle = pull.request.handle;
  const std::int64_t now = now_ns();
  const std::int64_t moved_ns = pull.moved_ns != 0 ? pull.moved_ns : pull.granted_ns;
  const std::int64_t checked_ns = pull.checked_ns != 0 ? pull.checked_ns : moved_ns;
  const std::int64_t converted_ns = std::max(pull.converted_ns, checked_ns);  // parts need not do both
  pull.result.phases_s = {{"connect", seconds(pull.request.submitted_ns, pull.claimed_ns)},
                          {"claim", seconds(pull.claimed_ns, pull.granted_ns)},
                          {"post", static_cast<double>(pull.post_ns) * 1e-9},
                          {"move", seconds(pull.started_ns, pull.moved_ns)},
                          {"check", seconds(moved_ns, checked_ns)},
                          {"convert", seconds(checked_ns, converted_ns)},
                          {"confirm", seconds(converted_ns, now)},
                          {"total", seconds(pull.request.submitted_ns, now)}};
  services_.counters.live.fetch_sub(1);
  deadlines_.erase({pull.request.deadline_ns, handle->id()});
  reservations_.end(handle->id().handoff, pull.result.failure);
  handle->settle(std::move(pull.result));
}

}  // namespace kvlink::handoff
