// The two books of a node, driven event by event: every order of what can end a handoff, and every guard of the table.
//
// With arguments `ROW GUARD` the books run on a table without that guard of that row: then some test must fail.
// Stands in for: handoff/reach.cpp
// Stands in for: transport/staged_sender.cpp
#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <string>

#include "checked_handoffs.hpp"
#include "converted_handoffs.hpp"
#include "push_orders.hpp"
#include "pushed_handoffs.hpp"
#include "scripted_sides.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using kvlink::test::in_every_order;
using kvlink::test::kSecond;
using kvlink::test::Remote;
using kvlink::test::SourceSide;
using kvlink::test::TargetSide;
using kvlink::test::transfers;

std::vector<Row>& table = test::books_table;

[[nodiscard]] Remote reader() {
  return {PeerRole::claimant, {}};
}
[[nodiscard]] Remote source(bool empty = false) {
  return {PeerRole::source, {transport::Lane::mapped}, empty};
}

const Failure kGivenUp{Code::cancelled, "scripted"};

struct OfferUnderTest : SourceSide {
  Remote first = reader();
  Remote second = reader();
  OfferUnderTest() : SourceSide(table) {}
};

void every_order_of_events_ends_an_offer_once() {
  for (const std::uint32_t readers : {1U, 2U}) {
    for (const std::uint32_t claims : {0U, 1U, 2U}) {
      const auto make = [&] {
        auto side = std::make_unique<OfferUnderTest>();
        side->services.holds->acquire_shared(test::kBlocks);  // of another offer: it must stay held
        side->offer(readers);
        if (claims > 0) side->claim(side->first, 1);
        if (claims > 1) side->claim(side->second, 1);
        return side;
      };
      in_every_order<OfferUnderTest>(
          make,
          {[](auto& side) { side.book.on_confirm(side.first.peer, side.attempt(1), 64); },   // finish
           [](auto& side) { side.book.cancel(side.id, kGivenUp); },                          // abort
           [](auto& side) { (void)side.book.turn(side.start + 11 * kSecond); },              // expire
           [](auto& side) { side.book.on_confirm(side.second.peer, side.attempt(1), 64); },  // late done
           [](auto& side) { side.book.on_cancel(side.first.peer, side.attempt(1)); },        // late fail
           [](auto& side) {                                                                  // peer death
             side.first.lose();
             side.book.on_peer_lost(side.first.peer);
           }},
          [](auto& side) {
            CHECK(side.handle->has_outcome());
            CHECK(side.handle->released());
            CHECK(side.ended() == 1);
            CHECK(side.services.counters.live == 0);
            CHECK(side.services.holds->count().shared == 2);
            // Each reader that was granted learned how it ended, once.
            for (Remote* remote : {&side.first, &side.second}) CHECK(remote->count(Kind::valid) <= 1);
          });
    }
  }
}

struct PullUnderTest : TargetSide {
  Remote remote = source();
  bool lost = false;
  std::unique_ptr<test::Gate> gate{};
  PullUnderTest() : TargetSide(table) {}
};

/// How far the pull has come when the events begin.
enum class Begun { connecting, claiming, moving, stuck, checking, converting, confirming };

std::unique_ptr<PullUnderTest> pull_at(Begun begun) {
  auto side = std::make_unique<PullUnderTest>();
  if (begun == Begun::connecting) side->remote.peer->state = PeerState::connecting;
  const bool checked = begun == Begun::checking;
  if (begun == Begun::converting) side->gate = test::hold_conversion(*side, *side->remote.peer, test::kMany);
  const auto integrity = checked ? transport::Integrity::crc32c : transport::Integrity::none;
  side->pull({side->remote.peer}, std::nullopt, integrity);
  if (begun == Begun::connecting || begun == Begun::claiming) return side;
  side->grant_summed(side->remote.peer, 0, integrity);
  transfers().front()->slow = begun == Begun::stuck;
  if (begun == Begun::confirming || begun == Begun::converting || checked) {
    transfers().front()->done = true;
    side->turn();
  }
  return side;
}

void every_order_of_events_ends_a_pull_once() {
  for (const Begun begun : {Begun::connecting, Begun::claiming, Begun::moving, Begun::stuck, Begun::checking,
                            Begun::converting, Begun::confirming}) {
    in_every_order<PullUnderTest>([begun] { return pull_at(begun); },
                                  {[](auto& side) { side.valid(0); },  // finish
                                   [](auto& side) { side.sums(side.remote.peer, 0); },
                                   [](auto& side) { side.book.cancel(side.parts[0].attempt, kGivenUp); },  // abort
                                   [](auto& side) { (void)side.book.turn(side.start + 11 * kSecond); },    // expire
                                   [](auto& side) {                                                        // late done
                                     for (auto& each : transfers()) each->done = true;
                                     if (side.gate) side.gate->open();
                                     side.turn();
                                   },
                                   [](auto& side) {  // late fail
                                     for (auto& each : transfers()) each->broken = !each->done;
                                     side.turn();
                                     side.book.on_refuse(side.remote.peer, side.parts[0].attempt,
                                                         {Code::ticket_expired, "scripted"});
                                   },
                                   [](auto& side) {  // peer death
                                     side.remote.lose();
                                     side.book.on_peer_lost(side.remote.peer);
                                   }},
                                  [](auto& side) {
                                    CHECK(side.handle->has_outcome());
                                    CHECK(side.handle->released());
                                    CHECK(side.ended() == 1);
                                    CHECK(side.services.counters.live == 0);
                                    CHECK(side.services.holds->count().exclusive == 0);
                                    CHECK(side.services.holds->count().quarantined == 0);
                                    CHECK(side.book.drained());
                                  });
  }
}

void a_pull_is_released_only_when_its_transfer_has_drained() {
  const auto side = pull_at(Begun::stuck);
  side->book.cancel(side->parts[0].attempt, kGivenUp);
  CHECK(side->handle->has_outcome());
  side->turn();
  CHECK(!side->handle->released());
  CHECK(side->services.holds->count().exclusive == 0);
  CHECK(side->services.holds->count().quarantined == 2);
  transfers().front()->done = true;
  side->turn();
  CHECK(side->handle->released());
  CHECK(side->services.holds->count().quarantined == 0);
}

void a_pull_is_released_when_threads_have_ended_that_never_finished() {
  const auto side = pull_at(Begun::stuck);
  side->book.close_all({Code::closed, "scripted"});
  CHECK(!side->handle->released());
  side->book.drop_transfers();
  CHECK(!side->handle->released());
  side->book.release_all();
  CHECK(side->handle->released());
}

void a_transfer_that_is_not_done_confirms_nothing() {
  const auto side = pull_at(Begun::moving);
  side->turn();
  CHECK(side->handle->state() == State::moving);
  CHECK(side->remote.count(Kind::confirm) == 0);
  transfers().front()->broken = true;
  side->turn();
  CHECK(side->handle->state() == State::failed);
  CHECK(side->remote.count(Kind::confirm) == 0);
}

void success_needs_confirm_and_valid() {
  const auto side = pull_at(Begun::confirming);
  CHECK(side->remote.count(Kind::confirm) == 1);
  side->valid(0);
  CHECK(side->handle->state() == State::succeeded);
  const auto early = pull_at(Begun::moving);
  early->valid(0);
  CHECK(early->handle->result()->failure->code == Code::protocol_error);
}

struct TwoSources : TargetSide {
  Remote left = source();
  Remote right = source();
  TwoSources() : TargetSide(table) {
    pull({left.peer, right.peer});
    grant(0);
    grant(1);
    (void)left.received();
    (void)right.received();
  }
};

void no_source_is_asked_before_all_bytes_are_here() {
  TwoSources side;
  transfers()[0]->done = true;
  side.turn();
  CHECK(side.left.count(Kind::confirm) == 0);
  transfers()[1]->done = true;
  side.turn();
  CHECK(side.left.count(Kind::confirm) == 1);
  CHECK(side.right.count(Kind::confirm) == 1);
  side.valid(0);
  CHECK(!side.handle->has_outcome());
  side.valid(1);
  CHECK(side.handle->state() == State::succeeded);
}

void a_pull_is_released_with_its_last_source() {
  TwoSources side;
  for (auto& each : transfers()) each->slow = true;
  side.book.cancel(side.parts[0].attempt, kGivenUp);
  transfers()[0]->done = true;
  side.turn();
  CHECK(!side.handle->released());
  transfers()[1]->done = true;
  side.turn();
  CHECK(side.handle->released());
  CHECK(side.services.holds->count().quarantined == 0);
}

void a_source_that_confirmed_may_go_and_another_may_not() {
  TwoSources side;
  for (auto& each : transfers()) each->done = true;
  side.turn();
  side.valid(0);
  side.left.lose();
  side.book.on_peer_lost(side.left.peer);
  CHECK(!side.handle->has_outcome());
  side.right.lose();
  side.book.on_peer_lost(side.right.peer);
  CHECK(side.handle->result()->failure->code == Code::peer_lost);
}

/// What another connection says about this one's attempt is dropped, whatever the state.
void a_pull_listens_only_to_its_own_source() {
  for (const Begun begun : {Begun::connecting, Begun::claiming, Begun::moving, Begun::confirming}) {
    const auto side = pull_at(begun);
    Remote other = source();
    const State before = side->handle->state();
    const std::size_t made = transfers().size();
    side->book.on_refuse(other.peer, side->parts[0].attempt, {Code::ticket_expired, "scripted"});
    side->grant_from(other.peer, 0);
    side->book.on_valid(other.peer, side->parts[0].attempt);
    CHECK(side->stale() == 3);
    other.lose();
    side->book.on_peer_lost(other.peer);
    CHECK(side->handle->state() == before);
    CHECK(transfers().size() == made);
    CHECK(side->ended() == 0);
  }
}

void a_second_grant_ends_the_pull() {
  const auto side = pull_at(Begun::moving);
  side->grant(0);
  CHECK(side->handle->result()->failure->code == Code::protocol_error);
}

void a_lane_that_does_not_lead_there_is_not_claimed() {
  TargetSide side(table);
  Remote remote = source();
  side.pull({remote.peer}, transport::Lane::get);
  CHECK(remote.count(Kind::claim) == 0);
  CHECK(side.handle->result()->failure->code == Code::lane_unavailable);
}

void a_source_of_nothing_is_confirmed_without_a_transfer() {
  TargetSide side(table);
  Remote remote = source(true);
  side.pull({remote.peer});
  side.grant(0);
  CHECK(transfers().empty());
  CHECK(remote.count(Kind::confirm) == 1);
}

void an_offer_ends_with_its_last_reader_and_not_before() {
  OfferUnderTest side;
  side.offer(2);
  side.claim(side.first, 1);
  side.book.on_confirm(side.first.peer, side.attempt(1), 64);
  CHECK(side.first.count(Kind::valid) == 1);
  CHECK(!side.handle->has_outcome());
  side.claim(side.second, 1);
  side.book.on_confirm(side.second.peer, side.attempt(1), 64);
  CHECK(side.handle->state() == State::succeeded);
}

void a_claim_is_granted_only_if_it_fits() {
  OfferUnderTest side;
  side.offer();
  side.claim(side.first, 1, test::kTokens + 1);
  CHECK(side.first.count(Kind::refuse) == 1);
  side.claim(side.first, 2);
  CHECK(side.first.count(Kind::grant) == 1);
  side.claim(side.second, 1);
  CHECK(side.second.count(Kind::refuse) == 1);
  side.claim(side.first, 2);
  CHECK(side.first.count(Kind::refuse) == 1);
}

void an_unknown_id_is_parked_only_if_a_mint_may_have_made_it() {
  OfferUnderTest side;
  side.claim(side.first, 1);
  CHECK(side.first.count(Kind::refuse) == 1);
  side.id.epoch = {2};
  side.claim(side.first, 1);
  CHECK(side.first.received().empty());
  side.offer();
  CHECK(side.first.count(Kind::grant) == 1);
}

void a_parked_claim_ends_by_its_own_reader() {
  for (const bool by_loss : {false, true}) {
    OfferUnderTest side;
    side.id.epoch = {2};
    side.claim(side.first, 1);
    side.book.on_cancel(side.first.peer, side.attempt(2));
    side.book.on_cancel(side.second.peer, side.attempt(1));
    side.second.lose();
    side.book.on_peer_lost(side.second.peer);
    if (by_loss) {
      side.first.lose();
      side.book.on_peer_lost(side.first.peer);
    }
    side.offer();
    CHECK(side.first.count(Kind::grant) == (by_loss ? 0U : 1U));
  }
}

void an_id_is_offered_once() {
  OfferUnderTest side;
  side.offer();
  const auto earlier = side.handle;
  side.offer();
  CHECK(side.handle->result()->failure->code == Code::invalid_argument);
  CHECK(side.handle->released());
  CHECK(!earlier->has_outcome());
  CHECK(side.services.holds->count().shared == 2);
}

/// What is said about another attempt, or over another connection, moves no grant.
void a_grant_listens_only_to_its_own_reader() {
  OfferUnderTest side;
  side.offer(2);
  side.claim(side.first, 1);
  (void)side.first.received();
  const auto expiry = side.book.next_deadline();
  const std::int64_t now = side.start + kSecond;
  const auto say = [&](Remote& remote, std::uint32_t number) {
    const Fetch fetch{.pieces = {{}}};
    const auto stale = side.stale();
    side.book.on_fetch(remote.peer, side.attempt(number), fetch);
    side.book.on_renew(remote.peer, std::vector<Renewal>{{side.attempt(number), 60'000}}, now);
    CHECK(side.stale() == stale + 2);
    CHECK(remote.count(Kind::refuse) == 0);
    side.book.on_confirm(remote.peer, side.attempt(number), 64);
    CHECK(remote.count(Kind::refuse) == 1);
    side.book.on_cancel(remote.peer, side.attempt(number));
  };
  say(side.second, 1);
  say(side.first, 2);
  side.second.lose();
  side.book.on_peer_lost(side.second.peer);
  CHECK(side.handle->state() == State::granted);
  CHECK(side.book.next_deadline() == expiry);
  side.book.on_confirm(side.first.peer, side.attempt(1), 64);
  CHECK(side.first.count(Kind::valid) == 1);
}

void an_offer_is_free_again_only_when_all_its_readers_have_gone() {
  OfferUnderTest side;
  side.offer(2);
  side.claim(side.first, 1);
  side.claim(side.second, 1);
  side.book.on_cancel(side.first.peer, side.attempt(1));
  CHECK(side.handle->state() == State::granted);
  side.book.on_cancel(side.second.peer, side.attempt(1));
  CHECK(side.handle->state() == State::offered);
  side.claim(side.first, 2);
  CHECK(side.first.count(Kind::grant) == 2);
}

void a_renewal_counts_from_receipt_and_ends_at_the_cap() {
  OfferUnderTest side;
  side.offer(1, 10, 25);
  side.claim(side.first, 1);
  const auto renew = [&](std::int64_t at_s, std::uint32_t lease_ms) {
    side.book.on_renew(side.first.peer, std::vector<Renewal>{{side.attempt(1), lease_ms}}, side.start + at_s * kSecond);
    return (side.book.next_deadline() - side.start) / kSecond;
  };
  CHECK(renew(5, 1000) == 10);     // Less than it has.
  CHECK(renew(5, 8000) == 13);     // What was asked for.
  CHECK(renew(6, 60'000) == 16);   // No more than the owner gave at first.
  CHECK(renew(15, 60'000) == 25);  // The cap.
  CHECK(renew(20, 60'000) == 25);
  CHECK(side.stale() == 0);
  CHECK(renew(26, 60'000) == 25);  // Over, though no turn of the loop has said so yet.
  CHECK(side.stale() == 1);
}

void a_lease_that_is_over_is_not_renewed() {
  OfferUnderTest side;
  side.offer(1, 10, 300);
  side.claim(side.first, 1);
  side.book.on_renew(side.first.peer, std::vector<Renewal>{{side.attempt(1), 60'000}}, side.start + 11 * kSecond);
  CHECK(side.stale() == 1);
  (void)side.book.turn(side.start + 11 * kSecond);
  CHECK(side.handle->result()->failure->code == Code::ticket_expired);
}

void a_lease_that_is_over_is_not_renewed_to_the_cap() {
  OfferUnderTest side;
  side.offer(1, 10, 12);
  side.claim(side.first, 1);
  side.book.on_renew(side.first.peer, std::vector<Renewal>{{side.attempt(1), 60'000}}, side.start + 11 * kSecond);
  CHECK(side.stale() == 1);
  CHECK(side.book.next_deadline() == side.start + 10 * kSecond);
}

void a_reader_renews_once_a_tick_and_only_what_its_deadline_needs() {
  TwoSources side;  // Leases of 60 s, a deadline of 10 s.
  (void)side.book.turn(side.start + 9 * kSecond);
  CHECK(side.left.count(Kind::renew) == 0);

  TargetSide again(table);
  Remote remote = source();
  again.pull({remote.peer, remote.peer});
  again.grant(0, 3000);
  again.grant(1, 6000);
  (void)again.book.turn(again.start + kSecond / 2);
  CHECK(remote.count(Kind::renew) == 0);
  (void)again.book.turn(again.start + 3 * kSecond / 2);
  CHECK(remote.count(Kind::renew) == 1);  // One frame for both.
  (void)again.book.turn(again.start + 2 * kSecond);
  CHECK(remote.count(Kind::renew) == 0);
  (void)again.book.turn(again.start + 3 * kSecond);
  CHECK(remote.count(Kind::renew) == 1);
  again.book.cancel(again.parts[0].attempt, kGivenUp);
  (void)again.book.turn(again.start + 6 * kSecond);
  CHECK(remote.count(Kind::renew) == 0);
}

void leave_out(const char* row, const char* guard) {
  table[std::strtoul(row, nullptr, 10)].guards.put(static_cast<If>(std::strtoul(guard, nullptr, 10)), false);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) leave_out(argv[1], argv[2]);
#define NAMED(test) {#test, test}
  test::Tests tests{
      NAMED(success_needs_confirm_and_valid),
      NAMED(a_transfer_that_is_not_done_confirms_nothing),
      NAMED(a_pull_is_released_only_when_its_transfer_has_drained),
      NAMED(a_pull_is_released_when_threads_have_ended_that_never_finished),
      NAMED(no_source_is_asked_before_all_bytes_are_here),
      NAMED(a_pull_is_released_with_its_last_source),
      NAMED(a_source_that_confirmed_may_go_and_another_may_not),
      NAMED(a_pull_listens_only_to_its_own_source),
      NAMED(a_second_grant_ends_the_pull),
      NAMED(a_lane_that_does_not_lead_there_is_not_claimed),
      NAMED(a_source_of_nothing_is_confirmed_without_a_transfer),
      NAMED(an_offer_ends_with_its_last_reader_and_not_before),
      NAMED(a_claim_is_granted_only_if_it_fits),
      NAMED(an_unknown_id_is_parked_only_if_a_mint_may_have_made_it),
      NAMED(a_parked_claim_ends_by_its_own_reader),
      NAMED(an_id_is_offered_once),
      NAMED(a_grant_listens_only_to_its_own_reader),
      NAMED(an_offer_is_free_again_only_when_all_its_readers_have_gone),
      NAMED(a_renewal_counts_from_receipt_and_ends_at_the_cap),
      NAMED(a_lease_that_is_over_is_not_renewed),
      NAMED(a_lease_that_is_over_is_not_renewed_to_the_cap),
      NAMED(a_reader_renews_once_a_tick_and_only_what_its_deadline_needs),
      NAMED(every_order_of_events_ends_an_offer_once),
      NAMED(every_order_of_events_ends_a_pull_once),
  };
  tests.insert(tests.begin(), std::begin(test::kCheckedHandoffs), std::end(test::kCheckedHandoffs));
  tests.insert(tests.end(), std::begin(test::kPushedHandoffs), std::end(test::kPushedHandoffs));
  tests.insert(tests.end(), std::begin(test::kPushOrders), std::end(test::kPushOrders));
  tests.insert(tests.begin(), std::begin(test::kConvertedHandoffs), std::end(test::kConvertedHandoffs));
  return test::run(tests);
}
