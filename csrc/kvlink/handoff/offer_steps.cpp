// How the source's rows of the table are carried out: what its guards ask for and its actions do.
#include <algorithm>
#include <cassert>
#include <limits>
#include <new>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/offer_book.hpp"
#include "kvlink/handoff/source_plan.hpp"

namespace kvlink::handoff {
namespace {

/// Claims that may wait for their offers, over all peers, and for how long at most.
constexpr std::size_t kParkedLimit = 4'096;
constexpr std::int64_t kLongestParkMs = 60'000;
/// Of one SUMS, so that other messages need not wait for long.
constexpr std::size_t kMostSumBytes = std::size_t{1} << 20;

[[nodiscard]] std::uint32_t remaining_ms(std::int64_t deadline_ns, std::int64_t now) noexcept {
  const std::int64_t left = std::max<std::int64_t>(0, (deadline_ns - now) / kNsPerMs);
  return static_cast<std::uint32_t>(std::min<std::int64_t>(left, std::numeric_limits<std::uint32_t>::max()));
}

/// When the lease ends that a renewal asks for: no longer than the owner gave at first.
[[nodiscard]] std::int64_t renewed_until(const OfferRequest& request, std::uint32_t asked_ms,
                                         std::int64_t now) noexcept {
  return now + std::min<std::int64_t>(asked_ms, request.ttl_ms) * kNsPerMs;
}

/// A source serves every demand; who demands nothing gets what the owner offers.
[[nodiscard]] transport::Integrity integrity_of(const OfferRequest& request, const Claim& claim) noexcept {
  return claim.integrity == transport::Integrity::none ? request.integrity : claim.integrity;
}

}  // namespace

Set<If> OfferBook::guards_of(const Offer& offer, const News& news) const {
  const OfferRequest& request = offer.request;
  Set<If> holding;
  holding.put(If::unseen, unseen(request.handle->id().handoff));
  holding.put(If::pushed, request.push != nullptr);
  holding.put(If::same_peer, request.push_peer && request.push_peer == news.peer);
  holding.put(If::last_reader, offer.validated >= offer.wanted());
  holding.put(If::no_grants, offer.grants.empty());
  holding.put(If::lease_lives, news.now < request.expires_ns);
  holding.put(If::within_cap, renewed_until(request, news.lease_ms, news.now) <= request.cap_ns);
  return holding;
}

Set<If> OfferBook::guards_of(const Offer* offer, const Grant* grant, const News& news) const {
  Set<If> holding;
  holding.put(If::known, offer != nullptr);
  const HandoffId& id = news.attempt.handoff;
  // Ids of this node's own are known before their tickets leave; only a mint's may come ahead of their offers.
  holding.put(If::may_park, id.epoch != services_.epoch && unseen(id) && parked_.size() < kParkedLimit);
  const bool is_push = offer != nullptr && offer->request.push;
  holding.put(If::invited, !is_push || offer->request.push_peer == news.peer);
  holding.put(If::pushed, is_push);
  holding.put(If::committed, !is_push || offer->request.push->is_committed());
  // An offer that is not there has no bounds: only `known` keeps it from being claimed.
  holding.put(If::tokens_fit, offer == nullptr || (news.claim && news.claim->end_token <= offer->request.num_tokens));
  holding.put(If::reader_left, offer == nullptr || (news.claim && offer->has_room(*news.claim)));
  if (grant != nullptr) {
    holding.put(If::same_peer, grant->peer == news.peer);
    holding.put(If::same_attempt, grant->attempt == news.attempt);
    holding.put(If::unsummed, !grant->sums);
    holding.put(If::sums, grant->integrity != transport::Integrity::none);
  }
  return holding;
}

void OfferBook::step_offer(Offer& offer, On event, const News& news) {
  const Row* const row = find_row(table_, Machine::offer, offer.at, event, guards_of(offer, news));
  if (row == nullptr) return;
  const auto shown = offer.request.handle;
  Offer* at = &offer;
  Offer ended;
  if (row->to != At::same) {
    const HandoffId id = offer.request.handle->id().handoff;
    if (row->to == At::ended) {
      // Out of the book before anything is told: what it says from here on finds no offer.
      ended = std::move(offer);
      if (offers_.contains(id) && ended.at != At::none) {
        leases_.erase({ended.request.expires_ns, id});
        offers_.erase(id);
      }
      at = &ended;
    } else if (offer.at == At::none) {
      at = &offers_.insert_or_assign(id, std::move(offer)).first->second;
    }
    at->at = row->to;
    if (row->to == At::offered) shown->set_state(State::offered);
    if (row->to == At::granted) shown->set_state(State::granted);
  }
  for (const Do action : row->actions) perform(action, *at, news);
}

void OfferBook::step_grant(Offer* offer, Grant* grant, At from, On event, const News& news) {
  const Row* const row = find_row(table_, Machine::grant, from, event, guards_of(offer, grant, news));
  if (row == nullptr) return;
  std::list<Grant> ended;  // Its only element, if the row ends the grant: gone before anything is told of it.
  if (row->to == At::granted && from == At::none) {
    ++news.peer->handoffs;
    news.peer->rate.begin(now_ns());
    if (offer->untouched()) offer->ranks = news.claim->ranks;
    grant = &offer->grants.emplace_back(Grant{.at = row->to,
                                              .peer = news.peer,
                                              .attempt = news.attempt,
                                              .claim = *news.claim,
                                              .integrity = integrity_of(offer->request, *news.claim)});
  } else if (row->to == At::parked) {
    const std::int64_t park_ms = std::min<std::int64_t>(news.claim->remaining_ms, kLongestParkMs);
    parked_.push_back(
        {.peer = news.peer, .attempt = news.attempt, .claim = *news.claim, .until_ns = now_ns() + park_ms * kNsPerMs});
  } else if (row->to == At::none && grant != nullptr) {
    grant->at = At::none;
    if (from != At::parked) {
      grant->peer->rate.end(now_ns(), event == On::confirm ? news.bytes : 0);
      const auto place = std::ranges::find_if(offer->grants, [&](const Grant& each) { return &each == grant; });
      ended.splice(ended.begin(), offer->grants, place);
    }
  } else if (row->to != At::same && grant != nullptr) {
    grant->at = row->to;
  }
  for (const Do action : row->actions) perform(action, offer, grant, news);
}

void OfferBook::perform(Do action, Offer& offer, const News& news) {
  const OfferRequest& request = offer.request;
  const HandoffId id = request.handle->id().handoff;
  switch (action) {
    case Do::start_lease:
      retired_.use(id.epoch);
      leases_.emplace(request.expires_ns, id);
      break;
    case Do::wake_parked:
      for (const Parked& each : take_parked([&](const Parked& parked) { return parked.attempt.handoff == id; })) {
        Grant waiting{.at = At::parked, .peer = each.peer, .attempt = each.attempt, .claim = each.claim};
        step_grant(&offer, &waiting, At::parked, On::opened,
                   {.peer = each.peer, .attempt = each.attempt, .claim = each.claim});
      }
      break;
    case Do::end_grants:
      while (!offer.grants.empty()) {
        Grant& grant = offer.grants.front();
        step_grant(&offer, &grant, grant.at, On::over,
                   {.peer = grant.peer, .attempt = grant.attempt, .failure = news.failure});
      }
      break;
    case Do::succeed:
      retire(id, Code::already_claimed);
      services_.counters.succeeded.fetch_add(1);
      break;
    case Do::fail:
      retire(id, news.failure->code);
      services_.counters.failed.fetch_add(1);
      break;
    case Do::free_shared:
      services_.counters.live.fetch_sub(1);
      if (request.push) {
        request.push->end(news.failure.value_or(Failure{Code::invalid_argument, "the push has succeeded already"}));
      } else {
        services_.holds->release_shared(request.blocks);
      }
      break;
    case Do::extend_lease:
      extend_lease(offer, renewed_until(request, news.lease_ms, news.now));
      break;
    case Do::extend_to_cap:
      extend_lease(offer, request.cap_ns);
      break;
    case Do::shorten_lease:
      if (request.retry_ms) {
        set_lease(offer, std::min(request.expires_ns, now_ns() + *request.retry_ms * kNsPerMs));
      }
      break;
    case Do::count_stale:
      services_.counters.stale_messages.fetch_add(1);
      break;
    case Do::settle:
      settle(offer, news.failure);
      break;
    case Do::release:
      request.handle->release();
      break;
    default:
      assert(false && "a row asks an offer for what only another machine does");
  }
}

void OfferBook::perform(Do action, Offer* offer, Grant* grant, const News& news) {
  switch (action) {
    case Do::claim_again:
      step_grant(offer, nullptr, At::none, On::claim, news);
      break;
    case Do::send_grant:
      send_grant(*offer, *grant);
      break;
    case Do::send_ready:
      send_ready(*offer, *grant);
      break;
    case Do::send_valid:
      offer->lane = transport::lane_name(grant->claim.lane);
      offer->bytes += news.bytes;
      news.peer->bytes += news.bytes;
      if (!news.peer->channel) break;
      write_empty(news.peer->channel->outbox(), Kind::valid, news.attempt);
      // At once, not at the end of the turn: settling wakes whoever waits here, and it may take this core.
      (void)news.peer->channel->flush();
      break;
    case Do::send_refuse:
      send_refuse(offer, news);
      break;
    case Do::count_refused:
      services_.counters.refused_claims.fetch_add(1);
      break;
    case Do::count_reader:
      ++offer->validated;
      break;
    case Do::count_stale:
      services_.counters.stale_messages.fetch_add(1);
      break;
    case Do::start_sender:
      start_sender(*offer, *grant, news);
      break;
    case Do::start_sums:
      start_sums(*offer, *grant, news);
      break;
    case Do::send_sums:
      send_sums(news);
      break;
    case Do::stop_sender:
      if (grant->sender) grant->sender->cancel();
      if (grant->sums) {
        grant->sums->work->cancel();
        grant->sums->called_off = true;  // a peer that does not read holds up no more than itself
      }
      break;
    case Do::tell_opened:
      step_offer(*offer, On::opened, news);
      break;
    case Do::tell_renew:
      step_offer(*offer, On::renew, news);
      break;
    case Do::tell_read:
      step_offer(*offer, On::read, news);
      break;
    case Do::tell_dropped:
      step_offer(*offer, On::dropped, end_of_push(*offer, news));
      break;
    default:
      assert(false && "a row asks a grant for what only another machine does");
  }
}

Failure OfferBook::why_refused(const Offer* offer, const News& news) const {
  if (news.failure) return *news.failure;  // The offer ends.
  if (offer == nullptr) return why_unknown(news.attempt.handoff);
  if (!news.claim) return {Code::unknown_handoff, "this attempt has no grant any more"};
  const OfferRequest& request = offer->request;
  if (request.push && request.push_peer != news.peer) {
    return {Code::unknown_handoff, "this is a push to another node"};
  }
  if (news.claim->end_token > request.num_tokens) {
    return {Code::not_offered, "tokens up to " + std::to_string(news.claim->end_token) + " were claimed, " +
                                   std::to_string(request.num_tokens) + " are offered"};
  }
  if (news.claim->ranks != offer->ranks && !offer->untouched()) {
    return {Code::already_claimed, "it was claimed by one of " + std::to_string(offer->ranks) +
                                       " ranks, and now by one of " + std::to_string(news.claim->ranks) +
                                       ": all ranks of a reader must say the same, and so must all readers"};
  }
  if (!offer->has_room(*news.claim)) {
    return {Code::already_claimed, "the offer has " + std::to_string(request.readers) +
                                       " reader(s) and all of them have claimed it; offer with readers=n for more"};
  }
  return {Code::already_claimed, "this attempt was granted before"};
}

void OfferBook::send_refuse(const Offer* offer, const News& news) {
  if (news.peer->channel) write_refuse(news.peer->channel->outbox(), news.attempt, why_refused(offer, news));
}

void OfferBook::send_grant(const Offer& offer, const Grant& grant) {
  const OfferRequest& request = offer.request;
  if (!grant.peer->channel) return;
  // Those of a push come with READY.
  BlockTables blocks(services_.holds->groups().size());
  if (!request.push) blocks = touched(request.blocks, services_.holds->groups(), 0, grant.claim.end_token);
  write_grant(grant.peer->channel->outbox(), grant.attempt,
              handoff::Grant{.remaining_ms = remaining_ms(request.expires_ns, now_ns()),
                             .num_tokens = request.num_tokens,
                             .integrity = grant.integrity,
                             .payload = request.payload,
                             .blocks = std::move(blocks)});
}

void OfferBook::start_sender(Offer& offer, Grant& grant, const News& news) {
  try {
    auto plan = plan_of_fetch(*news.peer, *news.fetch, blocks_of(offer.request), services_.holds->groups());
    if (grant.sender) grant.sender->cancel();  // of a piece that has arrived
    grant.sender = news.peer->reach.make_sender(std::move(plan), news.attempt, services_, news.peer->title(),
                                                news.fetch->chunk_address);
    senders_.push_back(grant.sender);
    grant.sender->start();
  } catch (const Error& error) {
    give_up(offer, grant, news, error);
  }
}

void OfferBook::give_up(Offer& offer, Grant& grant, const News& news, const Error& error) {
  // Told why, and then as if the reader had given up.
  News refused = news;
  refused.failure = Failure{error.code(), error.what()};
  send_refuse(&offer, refused);
  step_grant(&offer, &grant, grant.at, On::cancel, offer.request.push ? refused : news);
}

void OfferBook::start_sums(Offer& offer, Grant& grant, const News& news) {
  try {
    auto plan = plan_of_fetch(*news.peer, *news.fetch, blocks_of(offer.request), services_.holds->groups());
    auto cells = std::make_shared<const plan::SumCells>(std::move(plan), plan::Sides::source);
    auto work = std::make_shared<transport::Summing>(std::move(cells), grant.integrity, services_.memory,
                                                     *services_.copy_threads, services_.waker);
    grant.sums =
        std::make_shared<GrantSums>(GrantSums{.peer = news.peer, .attempt = news.attempt, .work = std::move(work)});
    sums_.push_back(grant.sums);
    grant.sums->work->start();
  } catch (const Error& error) {
    give_up(offer, grant, news, error);
  } catch (const std::bad_alloc&) {
    give_up(offer, grant, news, Error(Code::out_of_memory, "the source has no memory for the sums of this handoff"));
  }
}

void OfferBook::send_sums(const News& news) {
  GrantSums& sums = *news.sums;
  const auto rest = sums.work->sums().subspan(sums.sent_bytes);
  const auto now = rest.first(std::min(rest.size(), kMostSumBytes));
  write_sums(news.peer->channel->outbox(), news.attempt, {.first_byte = sums.sent_bytes, .bytes = now});
  sums.sent_bytes += now.size();
}

void OfferBook::extend_lease(Offer& offer, std::int64_t expires_ns) {
  if (expires_ns > offer.request.expires_ns) set_lease(offer, expires_ns);
}

void OfferBook::set_lease(Offer& offer, std::int64_t expires_ns) {
  std::int64_t& expires = offer.request.expires_ns;
  const HandoffId id = offer.request.handle->id().handoff;
  leases_.erase({expires, id});
  expires = expires_ns;
  leases_.emplace(expires, id);
}

void OfferBook::settle(Offer& offer, std::optional<Failure> failure) {
  const auto& handle = offer.request.handle;
  const std::string title = std::string(role_name(handle->role())) + " " +
                            text_of(offer.request.push ? offer.request.reservation : handle->id().handoff) + ": ";
  if (!failure && offer.validated < offer.request.readers) {
    const Retirement retirement = retired_.look_up(handle->id().handoff);
    failure = Failure{Code::invalid_argument, retirement == Retirement::none
                                                  ? "this ticket was offered here before, and lives"
                                                  : why_retired(retirement)};
  }
  if (failure) failure->message = title + failure->message;
  handle->settle({.failure = std::move(failure),
                  .failed = {},
                  .valid_prefix_tokens = offer.request.num_tokens,
                  .bytes = offer.bytes,
                  .lane = std::move(offer.lane),
                  .phases_s = {},
                  .payload = std::move(offer.request.payload)});
}

}  // namespace kvlink::handoff
