// The target of a push: a reservation, and then a part whose source says piece by piece what is ready.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/handoff/source_plan.hpp"
#include "kvlink/plan/block_pairs.hpp"

namespace kvlink::handoff {
namespace {

/// Heads of all components of all layers of each of the target's groups that come over a connection.
[[nodiscard]] std::vector<std::uint64_t> heads_of(const plan::Template& geometry, std::size_t groups) {
  std::vector<std::uint64_t> heads(groups);
  for (const plan::Op& op : geometry.ops()) heads[geometry.groups()[op.group].target_index] += op.heads;
  return heads;
}

}  // namespace

void PullBook::on_push(const PeerPtr& peer, const HandoffId& reservation, const Push& push) {
  News news{.peer = peer, .push = &push};
  const PartPtr part = reserved_for(reservation, news);
  step_part(part, On::push, news);
}

PullBook::PartPtr PullBook::reserved_for(const HandoffId& reservation, News& news) const {
  const auto handle = reservations_.find(reservation);
  if (!handle) {
    news.failure = reservations_.why_gone(reservation, services_.epoch);
    return nullptr;
  }
  news.failure = Failure{Code::unknown_handoff, "the reservation is ending"};
  const auto pull = pulls_.find(*handle);
  if (pull == pulls_.end()) return nullptr;
  const PullRequest& request = pull->second->request;
  const Peer& by = *news.peer;
  for (const PartRequest& asked : request.parts) {
    PartPtr part = find(asked.attempt);
    // It may have come by another connection to the same source than the one that was made for the reservation. Of
    // several sources such a one is right only if it is for the same share.
    const bool same = asked.peer == news.peer || request.parts.size() == 1 ||
                      (asked.peer->layout_template && asked.peer->layout_template == by.layout_template);
    if (!part || (request.names_sources && !(asked.source == by.epoch && same))) continue;
    news.failure.reset();
    return part;
  }
  if (request.names_sources) {
    std::string names;
    for (const PartRequest& asked : request.parts) names += (names.empty() ? "" : ", ") + asked.peer->title();
    news.failure = Failure{Code::invalid_argument, "the reservation is for pushes by " + names + " alone"};
  }
  return nullptr;
}

void PullBook::on_piece(const PeerPtr& peer, const AttemptId& attempt, const Ready& ready) {
  const PartPtr part = find(attempt);
  plan::Piece piece{.layers = {}, .first_token = ready.first_token, .end_token = ready.end_token};
  const std::size_t layers = peer->layout_template ? peer->layout_template->layers().size() : 0;
  if (ready.layers.empty() || ready.layers.back().end <= layers) piece.layers = mask_of(ready.layers, layers);
  const Failure untrue{Code::protocol_error,
                       "the source said that something is ready which is not of this push, or was "
                       "ready before"};
  step_part(part, On::piece, {.peer = peer, .piece = &piece, .ready = &ready, .failure = untrue});
}

void PullBook::on_commit(const PeerPtr& peer, const AttemptId& attempt, std::vector<std::byte> payload) {
  const Failure untrue{Code::protocol_error, "the source committed twice, or what is not ready"};
  step_part(find(attempt), On::commit, {.peer = peer, .payload = &payload, .failure = untrue});
}

bool PullBook::push_fits(const Part& part, const News& news) const {
  if (news.push->num_tokens != part.pull->request.num_tokens) return false;
  if (!services_.own_template || part.pull->request.parts.size() > 1) return true;  // see `reserved_for`
  // One connection may be for what one of several sources delivers: that would leave holes in the blocks.
  const std::size_t groups = services_.holds->groups().size();
  return heads_of(*news.peer->layout_template, groups) == heads_of(*services_.own_template, groups);
}

bool PullBook::piece_fits(const Part& part, const News& news) {
  const Filling& filling = *part.filling;
  if (filling.committed) return false;
  for (const plan::GroupGeometry& group : part.peer->layout_template->groups()) {
    const std::size_t g = group.source_index;
    if (g >= news.ready->blocks.size() || g >= filling.terms.blocks.size()) continue;
    // A table ends with the request, so that no source makes this node hold more and more of it.
    const std::uint64_t tokens = part.pull->request.num_tokens;
    const std::uint64_t most =
        group.slots ? group.source_num_blocks : (tokens + group.source_block_tokens - 1) / group.source_block_tokens;
    if (filling.terms.blocks[g].size() + news.ready->blocks[g].size() > most) return false;
  }
  if (news.ready->layers.empty()) return true;
  return filling.coverage.is_inside(*news.piece) && filling.coverage.is_new(*news.piece);
}

void PullBook::note_push_guards(const Part& part, const News& news, Set<If>& holding) const {
  const Filling* const filling = part.filling.get();
  holding.put(If::pushed, filling != nullptr);
  if (news.push != nullptr && part.at == At::reserved) {
    holding.put(If::push_fits, push_fits(part, news));
    const auto& lanes = news.peer->reach.lanes();
    const auto required = part.pull->request.lane;
    holding.put(If::lane_fits, required ? std::ranges::find(lanes, *required) != lanes.end() : !lanes.empty());
  }
  if (filling == nullptr) return;
  if (news.piece != nullptr) holding.put(If::piece_fits, piece_fits(part, news));
  holding.put(If::covered, !filling->committed && filling->coverage.complete());
  holding.put(If::has_pieces, filling->has_piece);
  holding.put(If::complete, filling->committed && !filling->has_piece);
}

void PullBook::perform_push(Do action, const PartPtr& part, const News& news) {
  switch (action) {
    case Do::adopt_source:
      adopt_source(part, news);
      break;
    case Do::send_decline:
      send_decline(part, news);
      break;
    case Do::open_pieces:
      open_pieces(part, news);
      break;
    case Do::take_piece: {
      Filling& filling = *part->filling;
      std::set<std::size_t> groups;  // of the source, of which something comes from there; some may stand here twice
      for (const auto& group : part->peer->layout_template->groups()) groups.insert(group.source_index);
      for (const std::size_t g : groups) {
        if (g >= news.ready->blocks.size()) continue;
        const auto& more = news.ready->blocks[g];
        filling.terms.blocks[g].insert(filling.terms.blocks[g].end(), more.begin(), more.end());
      }
      if (news.ready->layers.empty()) break;
      filling.coverage.add(*news.piece);
      filling.pieces.push_back(*news.piece);
      break;
    }
    case Do::take_commit:
      part->filling->committed = true;
      part->filling->payload = std::move(*news.payload);
      break;
    case Do::look_on:
      look_on(part);
      break;
    case Do::plan_whole: {
      // From here on like any pull.
      Grant whole = std::move(part->filling->terms);
      whole.payload = std::move(part->filling->payload);
      part->filling.reset();
      make_plan(part, whole);
      break;
    }
    default:
      perform_check(action, part, news);
  }
}

void PullBook::adopt_source(const PartPtr& part, const News& news) {
  auto& requested = part->pull->request.parts;
  const auto asked = std::ranges::find(requested, part->attempt, &PartRequest::attempt);
  parts_.erase(part->attempt);
  if (part->peer != news.peer) {  // `submit` has counted the source that was named.
    part->peer = news.peer;
    ++part->peer->handoffs;
  }
  // From here on it is about the offer that is pushed.
  part->attempt.handoff = news.push->offer;
  part->filling = std::make_unique<Filling>(Filling{
      .coverage = plan::Coverage(part->peer->layout_template->layers().size(), part->pull->request.num_tokens)});
  asked->attempt = part->attempt;
  asked->peer = part->peer;
  parts_.insert_or_assign(part->attempt, part);
}

void PullBook::send_decline(const PartPtr& part, const News& news) const {
  if (!news.peer->channel) return;
  Failure why{Code::already_claimed, "somebody pushes to this reservation already; reserve again"};
  if (news.failure) {
    why = *news.failure;
  } else if (part->at == At::reserved && news.push->num_tokens != part->pull->request.num_tokens) {
    why = {Code::invalid_argument, std::to_string(part->pull->request.num_tokens) + " tokens are reserved, and " +
                                       std::to_string(news.push->num_tokens) + " are pushed"};
  } else if (part->at == At::reserved && !push_fits(*part, news)) {
    why = {Code::layout_mismatch, "this connection is for a share of the cache only; push over one that is for all"};
  } else if (part->at == At::reserved) {
    why = {Code::lane_unavailable, "the lane that the reservation requires does not lead to the source"};
  }
  write_decline(news.peer->channel->outbox(), news.push->offer, why);
}

void PullBook::open_pieces(const PartPtr& part, const News& news) {
  part->pull->granted_ns = now_ns();
  part->integrity = news.grant->integrity;
  part->filling->terms = std::move(*news.grant);
  std::size_t groups = 0;
  for (const auto& group : part->peer->layout_template->groups()) {
    groups = std::max<std::size_t>(groups, std::size_t{group.source_index} + 1);
  }
  part->filling->terms.blocks.assign(groups, {});
  try {
    check_terms(*part, part->filling->terms);
  } catch (const Error& error) {
    fail(part, {error.code(), error.what()});
  }
}

void PullBook::next_plan(Part& part) const {
  Filling& filling = *part.filling;
  const plan::Template& geometry = *part.peer->layout_template;
  const PullRequest& request = part.pull->request;
  std::vector<plan::GroupTables> tables;
  for (const plan::GroupGeometry& group : geometry.groups()) {
    if (group.source_index >= filling.terms.blocks.size()) {
      throw Error(Code::protocol_error, "group '" + group.name + "' has no block table at the source");
    }
    tables.push_back(
        {.source = filling.terms.blocks[group.source_index], .target = request.blocks[group.target_index]});
  }
  filling.has_piece = false;
  while (!filling.pieces.empty() && !filling.has_piece) {
    part.plan = plan::take_plan(
        filling.pieces, part.peer->layout_template,
        {.tables = tables, .skip_tokens = request.skip_tokens, .num_tokens = request.num_tokens}, filling.layers);
    filling.has_piece = part.plan->total_bytes() != 0;  // What is not wanted has no bytes.
  }
  if (!filling.has_piece && filling.committed) part.plan = plan_of(part, pairs_of(part, filling.terms));
}

void PullBook::look_on(const PartPtr& part) {
  if (part->at != At::filling) return;  // It looks again once what moves has arrived.
  if (part->peer->conversion) return;   // Scratch memory takes a request as a whole, and so do its sums.
  try {
    next_plan(*part);
  } catch (const Error& error) {
    return fail(part, {error.code(), error.what()});
  }
  Filling& filling = *part->filling;
  if (!filling.has_piece && filling.committed && part->first) part->pull->result.payload = std::move(filling.payload);
  step_part(part, On::look, {.peer = part->peer});
}

}  // namespace kvlink::handoff
