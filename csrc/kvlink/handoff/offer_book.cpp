#include "kvlink/handoff/offer_book.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "kvlink/clock.hpp"

namespace kvlink::handoff {
namespace {

/// Why an offer ended is remembered for this many, so that a late claim learns it. That it has is never forgotten.
constexpr std::size_t kReasonLimit = 65'536;

}  // namespace

void OfferBook::add(OfferRequest request) {
  {
    const std::lock_guard lock(added_mutex_);
    added_.push_back(std::move(request));
  }
  services_.waker.ring();
}

void OfferBook::adopt_added() {
  std::vector<OfferRequest> added;
  {
    const std::lock_guard lock(added_mutex_);
    added.swap(added_);
  }
  for (OfferRequest& request : added) adopt(std::move(request));
}

void OfferBook::adopt(OfferRequest request) {
  const HandoffId id = request.handle->id().handoff;
  Offer offer{
      .at = At::none, .request = std::move(request), .validated = 0, .ranks = 1, .bytes = 0, .lane = {}, .grants = {}};
  step_offer(offer, On::offer, {.attempt = {.handoff = id, .attempt = 0}});
}

OfferBook::Offers::iterator OfferBook::find(const HandoffId& id) {
  const auto found = offers_.find(id);
  if (found != offers_.end()) return found;
  // A claim may arrive between the last turn and the call that made its offer known to the loop.
  adopt_added();
  return offers_.find(id);
}

std::deque<OfferBook::Parked> OfferBook::take_parked(const std::function<bool(const Parked&)>& test) {
  std::deque<Parked> taken;
  std::ranges::copy_if(parked_, std::back_inserter(taken), test);
  if (!taken.empty()) std::erase_if(parked_, test);
  return taken;
}

Failure OfferBook::why_unknown(const HandoffId& id) const {
  const auto reason = reasons_.find(id);
  if (reason == reasons_.end()) {
    const Retirement retirement = retired_.look_up(id);
    if (retirement != Retirement::none) return {Code::unknown_handoff, why_retired(retirement)};
    return {Code::unknown_handoff,
            id.epoch == services_.epoch ? "no such offer is known here" : "no offer came here under this ticket"};
  }
  switch (reason->second) {
    case Code::already_claimed:
      return {Code::already_claimed, "the offer was read by all its readers; make a new offer to read it again"};
    case Code::ticket_expired:
      return {Code::ticket_expired,
              "the offer's lease ran out before it was claimed; offer it again or with a longer ttl_s"};
    default:
      return {reason->second, "the offer was withdrawn"};
  }
}

void OfferBook::retire(const HandoffId& id, Code why) {
  retired_.add(id);
  reasons_[id] = why;
  reasons_order_.push_back(id);
  if (reasons_order_.size() <= kReasonLimit) return;
  reasons_.erase(reasons_order_.front());
  reasons_order_.pop_front();
}

OfferBook::Grant* OfferBook::nearest(Offer& offer, const News& news) {
  Grant* near = nullptr;
  for (Grant& grant : offer.grants) {
    if (grant.peer == news.peer && grant.attempt == news.attempt) return &grant;
    near = &grant;
  }
  return near;
}

void OfferBook::on_message(On event, const News& news) {
  const auto found = find(news.attempt.handoff);
  Offer* const offer = found == offers_.end() ? nullptr : &found->second;
  Grant* const grant = offer == nullptr ? nullptr : nearest(*offer, news);
  step_grant(offer, grant, grant == nullptr ? At::none : grant->at, event, news);
}

void OfferBook::on_claim(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim) {
  const News news{.peer = peer, .attempt = attempt, .claim = claim};
  const auto found = find(attempt.handoff);
  Offer* const offer = found == offers_.end() ? nullptr : &found->second;
  Grant* grant = offer == nullptr ? nullptr : nearest(*offer, news);
  // Another reader's grant is no answer to this claim: it asks for one of its own.
  if (grant != nullptr && (grant->peer != peer || grant->attempt != attempt)) grant = nullptr;
  step_grant(offer, grant, grant == nullptr ? At::none : grant->at, On::claim, news);
}

void OfferBook::on_check(const PeerPtr& peer, const AttemptId& attempt, const Fetch& pieces) {
  on_message(On::check, {.peer = peer, .attempt = attempt, .fetch = &pieces});
}

void OfferBook::on_fetch(const PeerPtr& peer, const AttemptId& attempt, const Fetch& fetch) {
  on_message(On::fetch, {.peer = peer, .attempt = attempt, .fetch = &fetch});
}

bool OfferBook::advance(GrantSums& sums) {
  bool busy = sums.work->advance();
  if (!sums.work->complete()) return busy;
  const std::uint64_t all = sums.work->sums().size();
  while (sums.sent_bytes != all) {
    const std::uint64_t before = sums.sent_bytes;
    if (sums.peer->channel) {
      (void)sums.peer->channel->flush();
      if (sums.peer->channel->wants_writable()) break;  // The loop wakes when the peer has read.
      on_message(On::summed, {.peer = sums.peer, .attempt = sums.attempt, .sums = &sums});
    }
    if (sums.sent_bytes == before) sums.sent_bytes = all;  // The grant is gone, and with it whoever asked.
    busy = true;
  }
  return busy;
}

void OfferBook::on_credit(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t chunks) {
  // No transition: only says how fast the sender of a grant may go, once or more a chunk.
  const News news{.peer = peer, .attempt = attempt};
  const auto found = find(attempt.handoff);
  Grant* const grant = found == offers_.end() ? nullptr : nearest(found->second, news);
  if (grant == nullptr || grant->peer != peer || grant->attempt != attempt || !grant->sender) {
    services_.counters.stale_messages.fetch_add(1);
    return;
  }
  grant->sender->credit(static_cast<std::uint32_t>(std::min<std::uint64_t>(chunks, UINT32_MAX)));
}

void OfferBook::on_confirm(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t bytes) {
  on_message(On::confirm, {.peer = peer, .attempt = attempt, .bytes = bytes});
}

void OfferBook::on_cancel(const PeerPtr& peer, const AttemptId& attempt) {
  const News news{.peer = peer, .attempt = attempt};
  // A copy: a step may take the claim out, or put one in.
  for (Parked& each : take_parked([&](const Parked& parked) { return parked.attempt.handoff == attempt.handoff; })) {
    Grant waiting{.at = At::parked, .peer = each.peer, .attempt = each.attempt, .claim = each.claim};
    step_grant(nullptr, &waiting, At::parked, On::cancel, news);
    if (waiting.at == At::parked) parked_.push_back(std::move(each));
  }
  on_message(On::cancel, news);
}

void OfferBook::on_renew(const PeerPtr& peer, std::span<const Renewal> renewals, std::int64_t now) {
  for (const Renewal& renewal : renewals) {
    on_message(On::renew, {.peer = peer, .attempt = renewal.attempt, .lease_ms = renewal.lease_ms, .now = now});
  }
}

void OfferBook::on_peer_lost(const PeerPtr& peer) {
  const News news{.peer = peer};
  for (Parked& each : take_parked([](const Parked&) { return true; })) {
    Grant waiting{.at = At::parked, .peer = each.peer, .attempt = each.attempt, .claim = each.claim};
    step_grant(nullptr, &waiting, At::parked, On::peer_lost, news);
    if (waiting.at == At::parked) parked_.push_back(std::move(each));
  }
  std::vector<Offer*> pushes;  // They end with it, which takes them out of the book.
  for (auto& [id, offer] : offers_) {
    if (offer.request.push) {
      pushes.push_back(&offer);
      continue;
    }
    for (auto grant = offer.grants.begin(); grant != offer.grants.end();) {
      Grant& each = *grant++;  // The step may erase it.
      step_grant(&offer, &each, each.at, On::peer_lost, news);
    }
  }
  for (Offer* const push : pushes) {
    if (push->grants.empty()) {
      step_offer(*push, On::peer_lost, end_of_push(*push, news));
    } else {
      step_grant(push, &push->grants.front(), push->grants.front().at, On::peer_lost, news);
    }
  }
}

void OfferBook::cancel(const HandoffId& id, const Failure& failure) {
  const auto found = find(id);
  if (found != offers_.end()) step_offer(found->second, On::cancel, {.failure = failure});
}

void OfferBook::close_all(const Failure& failure) {
  adopt_added();
  std::vector<HandoffId> ids;
  for (const auto& [id, offer] : offers_) ids.push_back(id);
  for (const HandoffId& id : ids) step_offer(offers_.at(id), On::close, {.failure = failure});
}

bool OfferBook::turn(std::int64_t now) noexcept {
  adopt_added();
  const auto late = take_parked([now](const Parked& parked) { return parked.until_ns <= now; });
  for (const Parked& each : late) {
    Grant waiting{.at = At::parked, .peer = each.peer, .attempt = each.attempt, .claim = each.claim};
    step_grant(nullptr, &waiting, At::parked, On::lapse, {.peer = each.peer, .attempt = each.attempt});
  }
  bool busy = !late.empty();
  while (!leases_.empty() && leases_.begin()->first <= now) {
    Offer& offer = offers_.at(leases_.begin()->second);
    Failure why{Code::ticket_expired, "the offer's lease ran out before all its readers had read it"};
    if (offer.request.push) {
      const std::string state = state_name(offer.request.handle->state());
      why = {Code::deadline_exceeded, "the deadline passed while the push was " + state};
    }
    step_offer(offer, On::expire, {.failure = std::move(why)});
    busy = true;
  }
  for (auto sender = senders_.begin(); sender != senders_.end();) {
    busy = (*sender)->advance() || busy;
    if (const auto failure = (*sender)->failure()) give_up(**sender, *failure);
    sender = (*sender)->drained() ? senders_.erase(sender) : std::next(sender);
  }
  for (auto sums = sums_.begin(); sums != sums_.end();) {
    busy = advance(**sums) || busy;
    sums = (*sums)->over() ? sums_.erase(sums) : std::next(sums);
  }
  return busy;
}

void OfferBook::give_up(const transport::StagedSender& sender, const Failure& failure) {
  const auto found = find(sender.attempt().handoff);
  if (found == offers_.end()) return;
  Offer& offer = found->second;
  const auto grant =
      std::ranges::find_if(offer.grants, [&](const Grant& each) { return each.sender.get() == &sender; });
  if (grant == offer.grants.end()) return;  // it has been told
  give_up(offer, *grant, {.peer = grant->peer, .attempt = grant->attempt}, Error(failure.code, failure.message));
}

std::int64_t OfferBook::next_deadline() noexcept {
  std::int64_t soonest = leases_.empty() ? std::numeric_limits<std::int64_t>::max() : leases_.begin()->first;
  for (const Parked& parked : parked_) soonest = std::min(soonest, parked.until_ns);
  return soonest;
}

bool OfferBook::knows(const HandoffId& id) {
  return id.epoch == services_.epoch || find(id) != offers_.end() || retired_.look_up(id) != Retirement::none;
}

void OfferBook::refuse_parked(const Failure& failure) {
  adopt_added();
  for (const Parked& each : take_parked([](const Parked&) { return true; })) {
    Grant waiting{.at = At::parked, .peer = each.peer, .attempt = each.attempt, .claim = each.claim};
    step_grant(nullptr, &waiting, At::parked, On::lapse,
               {.peer = each.peer, .attempt = each.attempt, .failure = failure});
  }
}

}  // namespace kvlink::handoff
