// The source of a push: an offer that grows, to the one node that has reserved.
#include <string>
#include <utility>

#include "kvlink/handoff/offer_book.hpp"
#include "kvlink/handoff/source_plan.hpp"

namespace kvlink::handoff {
namespace {

/// `own` has positions among `names`; those that the target takes, by their positions in its template.
[[nodiscard]] std::vector<bool> layers_of(const std::vector<bool>& own, std::span<const std::string> names,
                                          std::span<const std::string> wanted) {
  std::vector<bool> layers(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    // Nearly always at the same place in both.
    if (i < names.size() && names[i] == wanted[i]) {
      layers[i] = own[i];
      continue;
    }
    for (std::size_t k = 0; k < names.size(); ++k) {
      if (names[k] == wanted[i]) layers[i] = own[k];
    }
  }
  return layers;
}

}  // namespace

void OfferBook::start_push(const HandoffId& id, const PeerPtr& peer) {
  const auto found = find(id);
  if (found == offers_.end() || found->second.request.push_peer) return;
  Offer& offer = found->second;
  offer.request.push_peer = peer;
  if (!peer->channel) return step_offer(offer, On::peer_lost, end_of_push(offer, {.peer = peer}));
  write_push(peer->channel->outbox(), offer.request.reservation, {.offer = id, .num_tokens = offer.request.num_tokens});
}

void OfferBook::call_off_push(const PeerPtr& peer, const HandoffId& reservation, const Push& push) {
  if (peer->channel) write_push(peer->channel->outbox(), reservation, push);
}

void OfferBook::tell_ready(const HandoffId& id) {
  const auto found = find(id);
  if (found == offers_.end()) return;
  Offer& offer = found->second;
  for (Grant& grant : offer.grants) {
    step_grant(&offer, &grant, grant.at, On::told, {.peer = grant.peer, .attempt = grant.attempt});
  }
}

void OfferBook::on_decline(const PeerPtr& peer, const HandoffId& id, const Refuse& decline) {
  const auto found = find(id);
  if (found == offers_.end() || found->second.at != At::offered) {
    services_.counters.stale_messages.fetch_add(1);
    return;
  }
  step_offer(found->second, On::decline,
             {.peer = peer, .failure = Failure{decline.code, peer->title() + ": " + decline.message}});
}

void OfferBook::send_ready(const Offer& offer, const Grant& grant) {
  if (!offer.request.push || !grant.peer->channel) return;
  PushState& push = *offer.request.push;
  PushState::Batch batch = push.take();
  auto& outbox = grant.peer->channel->outbox();
  const auto wanted = grant.peer->layout_template->layers();
  Ready ready;
  ready.blocks = std::move(batch.blocks);
  for (const plan::Piece& piece : batch.pieces) {
    ready.layers = ranges_of(layers_of(piece.layers, push.layers(), wanted));
    if (ready.layers.empty()) continue;  // The target has none of them.
    ready.first_token = piece.first_token;
    ready.end_token = piece.end_token;
    write_ready(outbox, grant.attempt, ready);
    ready.blocks.clear();
    batch.has_blocks = false;
  }
  if (batch.has_blocks) {  // Nobody has said that something in them is ready.
    ready.layers.clear();
    ready.first_token = ready.end_token = 0;
    write_ready(outbox, grant.attempt, ready);
  }
  if (batch.commit) write_commit(outbox, grant.attempt, *batch.commit);
}

OfferBook::News OfferBook::end_of_push(const Offer& offer, const News& news) {
  News ending = news;
  if (!offer.request.push || ending.failure) return ending;
  if (news.peer->lost) {
    ending.failure = Failure{news.peer->lost->code, news.peer->title() + ": " + news.peer->lost->message};
  } else if (!news.peer->channel) {
    ending.failure = Failure{Code::peer_lost, "the connection to " + news.peer->title() + " is gone"};
  } else {
    ending.failure =
        Failure{Code::cancelled, news.peer->title() +
                                     " has given the reservation up: it was cancelled or closed there, its "
                                     "time ran out, or the bytes could not be moved"};
  }
  return ending;
}

}  // namespace kvlink::handoff
