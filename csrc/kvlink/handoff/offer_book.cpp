#include "kvlink/handoff/offer_book.hpp"

#include <algorithm>
#include <limits>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/source_plan.hpp"

namespace kvlink::handoff {
namespace {

/// An end is remembered for this many offers, so that a late claim learns why it comes too late.
constexpr std::size_t kRetiredLimit = 65'536;
/// Claims that may wait for their offers, over all peers, and for how long at most.
constexpr std::size_t kParkedLimit = 4'096;
constexpr std::int64_t kLongestParkMs = 60'000;

[[nodiscard]] std::uint32_t remaining_ms(std::int64_t deadline_ns, std::int64_t now) noexcept {
  const std::int64_t left = std::max<std::int64_t>(0, (deadline_ns - now) / kNsPerMs);
  return static_cast<std::uint32_t>(std::min<std::int64_t>(left, std::numeric_limits<std::uint32_t>::max()));
}

void refuse(Peer& peer, const AttemptId& attempt, const Failure& failure) {
  if (peer.channel) write_refuse(peer.channel->outbox(), attempt, failure);
}

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
  const bool again = offers_.contains(id) || retired_.contains(id);
  const std::int64_t expires_ns = request.expires_ns;
  if (again) {
    services_.holds->release_shared(request.blocks);
    services_.counters.live.fetch_sub(1);
    Result result;
    result.failure = Failure{Code::invalid_argument, "offer " + text_of(id) + ": this ticket was offered here before"};
    request.handle->settle(std::move(result));
    request.handle->release();
    return;
  }
  leases_.emplace(expires_ns, id);
  offers_.emplace(id, Offer{.request = std::move(request), .lane = {}, .grants = {}});
  std::deque<Parked> waited;
  for (Parked& parked : parked_) {
    if (parked.attempt.handoff == id) waited.push_back(parked);
  }
  std::erase_if(parked_, [&](const Parked& parked) { return parked.attempt.handoff == id; });
  for (const Parked& parked : waited) on_claim(parked.peer, parked.attempt, parked.claim);
}

OfferBook::Offers::iterator OfferBook::find(const HandoffId& id) {
  const auto found = offers_.find(id);
  if (found != offers_.end()) return found;
  // A claim may arrive between the last turn and the call that made its offer known to the loop.
  adopt_added();
  return offers_.find(id);
}

bool OfferBook::park(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim) {
  // Ids of this node's own are known before their tickets leave; only a mint's may come ahead of their offers.
  if (attempt.handoff.epoch == services_.epoch || retired_.contains(attempt.handoff)) return false;
  if (parked_.size() >= kParkedLimit) return false;
  parked_.push_back({.peer = peer,
                     .attempt = attempt,
                     .claim = claim,
                     .until_ns = now_ns() + std::min<std::int64_t>(claim.remaining_ms, kLongestParkMs) * kNsPerMs});
  return true;
}

bool OfferBook::forget_parked(std::int64_t now) {
  std::deque<Parked> late;
  for (Parked& parked : parked_) {
    if (parked.until_ns <= now) late.push_back(parked);
  }
  std::erase_if(parked_, [&](const Parked& parked) { return parked.until_ns <= now; });
  for (const Parked& parked : late) {
    services_.counters.refused_claims.fetch_add(1);
    refuse(*parked.peer, parked.attempt, why_unknown(parked.attempt.handoff));
  }
  return !late.empty();
}

Failure OfferBook::why_unknown(const HandoffId& id) const {
  const auto retired = retired_.find(id);
  if (retired == retired_.end()) {
    return {Code::unknown_handoff,
            id.epoch == services_.epoch ? "no such offer is known here" : "no offer came here under this ticket"};
  }
  switch (retired->second) {
    case Code::already_claimed:
      return {Code::already_claimed, "the offer was read by all its readers; make a new offer to read it again"};
    case Code::ticket_expired:
      return {Code::ticket_expired,
              "the offer's lease ran out before it was claimed; offer it again or with a longer ttl_s"};
    default:
      return {retired->second, "the offer was withdrawn"};
  }
}

void OfferBook::remember(const HandoffId& id, Code why) {
  retired_[id] = why;
  retired_order_.push_back(id);
  if (retired_order_.size() <= kRetiredLimit) return;
  retired_.erase(retired_order_.front());
  retired_order_.pop_front();
}

std::optional<Failure> OfferBook::why_refused(const Offer& offer, const Claim& claim) const {
  if (claim.end_token > offer.request.num_tokens) {
    return Failure{Code::not_offered, "tokens up to " + std::to_string(claim.end_token) + " were claimed, " +
                                          std::to_string(offer.request.num_tokens) + " are offered"};
  }
  if (offer.validated + offer.grants.size() >= offer.request.readers) {
    return Failure{Code::already_claimed,
                   "the offer has " + std::to_string(offer.request.readers) +
                       " reader(s) and all of them have claimed it; offer with readers=n for more"};
  }
  return std::nullopt;
}

void OfferBook::on_claim(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim) {
  const auto found = find(attempt.handoff);
  if (found == offers_.end() && park(peer, attempt, claim)) return;
  const auto refusal =
      found == offers_.end() ? std::optional(why_unknown(attempt.handoff)) : why_refused(found->second, claim);
  if (refusal || find_grant(peer, attempt) != nullptr) {
    services_.counters.refused_claims.fetch_add(1);
    refuse(*peer, attempt, refusal.value_or(Failure{Code::already_claimed, "this attempt was granted before"}));
    return;
  }
  Offer& offer = found->second;
  offer.grants.push_back({.peer = peer, .attempt = attempt, .claim = claim, .sender = nullptr});
  offer.request.handle->set_state(State::granted);
  ++peer->handoffs;
  const Grant& grant = offer.grants.back();
  write_grant(peer->channel->outbox(), grant.attempt,
              handoff::Grant{.remaining_ms = remaining_ms(offer.request.expires_ns, now_ns()),
                             .num_tokens = offer.request.num_tokens,
                             .payload = offer.request.payload,
                             .blocks = touched(offer.request.blocks, services_.holds->groups(), 0, claim.end_token)});
}

OfferBook::Grant* OfferBook::find_grant(const PeerPtr& peer, const AttemptId& attempt) {
  const auto offer = find(attempt.handoff);
  if (offer == offers_.end()) return nullptr;
  for (Grant& grant : offer->second.grants) {
    if (grant.peer == peer && grant.attempt == attempt) return &grant;
  }
  return nullptr;
}

void OfferBook::on_fetch(const PeerPtr& peer, const AttemptId& attempt, const Fetch& fetch) {
  Grant* const grant = find_grant(peer, attempt);
  if (grant == nullptr || grant->fetched) {
    services_.counters.stale_messages.fetch_add(1);
    return;
  }
  grant->fetched = true;
  const Offer& offer = find(attempt.handoff)->second;
  try {
    auto plan = plan_of_fetch(*peer, fetch, offer.request.blocks, services_.holds->groups());
    grant->sender = peer->reach.make_sender(std::move(plan), attempt, services_, peer->title());
    senders_.push_back(grant->sender);
    grant->sender->start();
  } catch (const Error& error) {
    refuse(*peer, attempt, {error.code(), error.what()});
    on_cancel(peer, attempt);
  }
}

void OfferBook::on_credit(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t chunks) {
  Grant* const grant = find_grant(peer, attempt);
  if (grant == nullptr || !grant->sender) {
    services_.counters.stale_messages.fetch_add(1);
    return;
  }
  grant->sender->credit(static_cast<std::uint32_t>(std::min<std::uint64_t>(chunks, UINT32_MAX)));
}

void OfferBook::on_confirm(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t bytes) {
  Grant* const grant = find_grant(peer, attempt);
  if (grant == nullptr) {
    // The grant lapsed while its bytes were on their way: what was read may be anything (P1).
    services_.counters.stale_messages.fetch_add(1);
    refuse(*peer, attempt, why_unknown(attempt.handoff));
    return;
  }
  const auto found = find(attempt.handoff);
  Offer& offer = found->second;
  offer.lane = transport::lane_name(grant->claim.lane);
  offer.bytes += bytes;
  peer->bytes += bytes;
  write_empty(peer->channel->outbox(), Kind::valid, attempt);
  // At once, not at the end of the turn: settling below wakes whoever waits here, and it may take this core.
  (void)peer->channel->flush();
  end_grant(*grant);
  std::erase_if(offer.grants, [&](const Grant& each) { return each.peer == peer && each.attempt == attempt; });
  if (++offer.validated == offer.request.readers) end(found, std::nullopt);
}

void OfferBook::on_cancel(const PeerPtr& peer, const AttemptId& attempt) {
  std::erase_if(parked_, [&](const Parked& each) { return each.peer == peer && each.attempt == attempt; });
  Grant* const grant = find_grant(peer, attempt);
  if (grant == nullptr) return;
  end_grant(*grant);
  Offer& offer = find(attempt.handoff)->second;
  std::erase_if(offer.grants, [&](const Grant& each) { return each.peer == peer && each.attempt == attempt; });
  if (offer.grants.empty()) offer.request.handle->set_state(State::offered);
}

void OfferBook::on_peer_lost(const PeerPtr& peer) {
  std::erase_if(parked_, [&](const Parked& each) { return each.peer == peer; });
  for (auto& [id, offer] : offers_) {
    for (Grant& grant : offer.grants) {
      if (grant.peer == peer) end_grant(grant);
    }
    std::erase_if(offer.grants, [&](const Grant& grant) { return grant.peer == peer; });
    if (offer.grants.empty()) offer.request.handle->set_state(State::offered);
  }
}

void OfferBook::end_grant(Grant& grant) noexcept {
  if (grant.sender) grant.sender->cancel();
}

void OfferBook::end(Offers::iterator found, std::optional<Failure> failure) {
  Offer& offer = found->second;
  for (Grant& grant : offer.grants) {
    end_grant(grant);
    refuse(*grant.peer, grant.attempt, *failure);  // Only a failed offer still has live grants.
  }
  remember(found->first, failure ? failure->code : Code::already_claimed);
  services_.counters.live.fetch_sub(1);
  (failure ? services_.counters.failed : services_.counters.succeeded).fetch_add(1);
  // Released together with the outcome: from here on no CONFIRM of a reader is answered with VALID (P1, P2).
  services_.holds->release_shared(offer.request.blocks);
  const auto handle = offer.request.handle;
  if (failure) failure->message = "offer " + text_of(handle->id().handoff) + ": " + failure->message;
  Result result{.failure = std::move(failure),
                .failed = {},
                .valid_prefix_tokens = offer.request.num_tokens,
                .bytes = offer.bytes,
                .lane = std::move(offer.lane),
                .phases_s = {},
                .payload = std::move(offer.request.payload)};
  leases_.erase({offer.request.expires_ns, found->first});
  offers_.erase(found);
  handle->settle(std::move(result));
  handle->release();
}

void OfferBook::cancel(const HandoffId& id, const Failure& failure) {
  const auto found = find(id);
  if (found != offers_.end()) end(found, failure);
}

void OfferBook::close_all(const Failure& failure) {
  adopt_added();
  while (!offers_.empty()) end(offers_.begin(), failure);
}

bool OfferBook::turn(std::int64_t now) noexcept {
  adopt_added();
  bool busy = forget_parked(now);
  while (!leases_.empty() && leases_.begin()->first <= now) {
    end(offers_.find(leases_.begin()->second),
        Failure{Code::ticket_expired, "the offer's lease ran out before all its readers had read it"});
    busy = true;
  }
  for (auto sender = senders_.begin(); sender != senders_.end();) {
    busy = (*sender)->advance() || busy;
    sender = (*sender)->drained() ? senders_.erase(sender) : std::next(sender);
  }
  return busy;
}

std::int64_t OfferBook::next_deadline() noexcept {
  std::int64_t soonest = leases_.empty() ? std::numeric_limits<std::int64_t>::max() : leases_.begin()->first;
  for (const Parked& parked : parked_) soonest = std::min(soonest, parked.until_ns);
  return soonest;
}

bool OfferBook::knows(const HandoffId& id) {
  return id.epoch == services_.epoch || find(id) != offers_.end() || retired_.contains(id);
}

void OfferBook::refuse_parked(const Failure& failure) {
  adopt_added();
  for (const Parked& parked : std::exchange(parked_, {})) {
    services_.counters.refused_claims.fetch_add(1);
    refuse(*parked.peer, parked.attempt, failure);
  }
}

}  // namespace kvlink::handoff
