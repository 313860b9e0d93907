// Tests of the books with pushes that end in any order, and with reservations that name their sources, for
// test_handoff_books.cpp.
#pragma once

#include "pushed_handoffs.hpp"

namespace kvlink::test {

/// How far a push has come, at its source, when the events begin.
enum class Pushed { announced, claimed, told, committed };

inline std::unique_ptr<PushingSide> push_at(Pushed begun) {
  auto side = std::make_unique<PushingSide>();
  if (begun != Pushed::announced) side->claim(side->first, 1);
  if (begun == Pushed::told || begun == Pushed::committed) side->ready(0, 1);
  if (begun == Pushed::committed) side->commit();
  return side;
}

inline void every_order_of_events_ends_a_push_once() {
  for (const Pushed begun : {Pushed::announced, Pushed::claimed, Pushed::told, Pushed::committed}) {
    const auto make = [begun] {
      auto side = push_at(begun);
      side->services.holds->acquire_shared(kBlocks);  // of another offer: it must stay held
      return side;
    };
    in_every_order<PushingSide>(
        make,
        {[](auto& side) {  // finish
           try {
             side.commit();
           } catch (const Error&) {  // it was committed, or has ended
           }
           side.book.on_confirm(side.first.peer, side.attempt(1), 64);
         },
         [](auto& side) { side.book.cancel(side.id, {Code::cancelled, "scripted"}); },    // abort
         [](auto& side) { (void)side.book.turn(side.start + 11 * kSecond); },             // expire
         [](auto& side) { side.book.on_confirm(side.first.peer, side.attempt(1), 64); },  // late done
         [](auto& side) {                                                                 // late fail
           side.book.on_cancel(side.first.peer, side.attempt(1));
           side.decline(side.first);
         },
         [](auto& side) {  // peer death
           side.first.lose();
           side.book.on_peer_lost(side.first.peer);
         }},
        [](auto& side) {
          CHECK(side.handle->has_outcome());
          CHECK(side.handle->released());
          CHECK(side.ended() == 1);
          CHECK(side.services.counters.live == 0);
          CHECK(side.services.holds->count().shared == 2);
          CHECK(side.first.count(handoff::Kind::valid) <= 1);
        });
  }
}

/// How far a push has come, at its target, when the events begin.
enum class Filled { reserved, claiming, filling, moving, stuck, checking, converting, confirming };

struct FilledSide : ReservingSide {
  std::unique_ptr<Gate> gate{};
  explicit FilledSide(Filled begun) : ReservingSide(integrity_of(begun)) {
    if (begun == Filled::reserved) return;
    if (begun == Filled::converting) gate = hold_conversion(*this, *first.peer, kMany);
    if (begun == Filled::claiming) {
      push(first);
      return;
    }
    begin(integrity_of(begun));
    if (begun == Filled::filling) return;
    const bool part_of_it = begun == Filled::moving || begun == Filled::stuck;
    ready(0, part_of_it ? 1 : kTokens, true);
    if (!transfers().empty()) transfers().back()->slow = begun == Filled::stuck;
    if (part_of_it) return;
    commit();
    arrive();
  }
  ~FilledSide() {
    if (gate) gate->open();
  }
  /// Everything that still writes stops, as it does in the end.
  void drain() {
    for (auto& each : transfers()) each->done = true;
    if (gate) gate->open();
    gate.reset();
    turn();
    turn();
  }
  [[nodiscard]] static transport::Integrity integrity_of(Filled begun) {
    return begun == Filled::checking ? transport::Integrity::crc32c : transport::Integrity::none;
  }
};

inline void every_order_of_events_ends_a_reservation_once() {
  for (const Filled begun : {Filled::reserved, Filled::claiming, Filled::filling, Filled::moving, Filled::stuck,
                             Filled::checking, Filled::converting, Filled::confirming}) {
    in_every_order<FilledSide>(
        [begun] { return std::make_unique<FilledSide>(begun); },
        {[](auto& side) {  // finish
           side.commit();
           side.sums(side.first.peer, 0);
           side.valid(0);
         },
         [](auto& side) { side.book.cancel(side.handle->id(), {Code::cancelled, "scripted"}); },  // abort
         [](auto& side) { (void)side.book.turn(side.start + 11 * kSecond); },                     // expire
         [](auto& side) { side.drain(); },                                                        // late done
         [](auto& side) {                                                                         // late fail
           for (auto& each : transfers()) each->broken = !each->done;
           side.turn();
           side.book.on_refuse(side.first.peer, side.parts.front().attempt, {Code::ticket_expired, "scripted"});
         },
         [](auto& side) {  // peer death
           side.first.lose();
           side.book.on_peer_lost(side.first.peer);
         }},
        [](auto& side) {
          side.drain();
          CHECK(side.handle->has_outcome());
          CHECK(side.handle->released());
          CHECK(side.ended() == 1);
          CHECK(side.services.counters.live == 0);
          CHECK(side.services.holds->count().exclusive == 0);
          CHECK(side.services.holds->count().quarantined == 0);
          CHECK(side.book.drained());
          side.push(side.second);  // whoever comes now is told
          CHECK(side.second.count(handoff::Kind::decline) == 1);
        });
  }
}

/// A reservation for two sources, which push together.
struct NamingSide : TargetSide {
  Remote left{handoff::PeerRole::source, {transport::Lane::mapped}};
  Remote right{handoff::PeerRole::source, {transport::Lane::mapped}};
  Remote stranger{handoff::PeerRole::source, {transport::Lane::mapped}};
  HandoffId reservation{.epoch = {1}, .sequence = 4};

  explicit NamingSide(bool alone = false) : TargetSide(books_table) {
    std::uint8_t number = 2;
    for (Remote* remote : {&left, &right, &stranger}) remote->peer->epoch = {number++};
    for (const Remote* remote : {&left, &right}) {
      const AttemptId attempt{.handoff = reservation, .attempt = static_cast<std::uint32_t>(parts.size() + 1)};
      parts.push_back({.attempt = attempt, .peer = remote->peer, .source = remote->peer->epoch});
      if (alone) break;
    }
    handle = std::make_shared<handoff::Handoff>(handoff::Role::reservation, parts.front().attempt, "",
                                                handoff::State::reserved, services.bells);
    services.holds->acquire_exclusive(kBlocks);
    ++services.counters.live;
    book.submit({.handle = handle,
                 .parts = parts,
                 .blocks = kBlocks,
                 .written = kBlocks,
                 .num_tokens = kTokens,
                 .skip_tokens = 0,
                 .submitted_ns = start,
                 .deadline_ns = start + 10 * kSecond,
                 .lane = std::nullopt,
                 .integrity = transport::Integrity::none,
                 .is_reservation = true,
                 .names_sources = true});
  }
  [[nodiscard]] static HandoffId offer_of(const Remote& remote) { return {.epoch = remote.peer->epoch, .sequence = 8}; }
  void push(const Remote& remote) {
    book.on_push(remote.peer, reservation, {.offer = offer_of(remote), .num_tokens = kTokens});
  }
  /// One source's whole push, up to COMMIT.
  void fill(const Remote& remote, std::size_t part, std::byte payload) {
    push(remote);
    parts[part].attempt.handoff = offer_of(remote);
    grant_from(remote.peer, part);
    book.on_piece(remote.peer, parts[part].attempt,
                  {.layers = {{.first = 0, .end = 1}}, .first_token = 0, .end_token = kTokens, .blocks = {{0, 1}}});
    book.on_commit(remote.peer, parts[part].attempt, {payload});
    transfers().back()->done = true;
    turn();
  }
};

inline void every_named_source_pushes_its_part_and_nobody_else() {
  NamingSide side;
  side.push(side.stranger);
  CHECK(side.stranger.count(handoff::Kind::decline) == 1);
  side.fill(side.right, 1, std::byte{6});
  CHECK(side.right.count(handoff::Kind::confirm) == 0);  // Not before the others have come.
  side.push(side.right);
  CHECK(side.right.count(handoff::Kind::decline) == 1);
  side.fill(side.left, 0, std::byte{5});
  CHECK(side.left.count(handoff::Kind::confirm) == 1);
  CHECK(side.right.count(handoff::Kind::confirm) == 1);
  side.valid(0);
  CHECK(!side.handle->has_outcome());
  side.valid(1);
  CHECK(side.handle->state() == handoff::State::succeeded);
  CHECK(side.handle->result()->payload == std::vector{std::byte{5}});
  CHECK(side.handle->result()->bytes == 2 * kTokens * kBlockBytes);
  CHECK(side.book.drained());
}

inline void a_named_source_that_dies_before_it_pushes_ends_the_reservation() {
  for (const bool other_has_pushed : {false, true}) {
    NamingSide side;
    if (other_has_pushed) side.fill(side.left, 0, std::byte{5});
    side.stranger.lose();
    side.book.on_peer_lost(side.stranger.peer);
    CHECK(!side.handle->has_outcome());
    side.right.lose();
    side.book.on_peer_lost(side.right.peer);
    CHECK(side.handle->result()->failure->code == Code::peer_lost);
    CHECK(side.handle->released());
    CHECK(side.services.holds->count().exclusive == 0);
    CHECK(side.left.count(handoff::Kind::cancel) == (other_has_pushed ? 1U : 0U));
    side.push(side.left);
    CHECK(side.left.count(handoff::Kind::decline) == 1);
  }
  ReservingSide unnamed;
  unnamed.second.lose();
  unnamed.book.on_peer_lost(unnamed.second.peer);
  CHECK(!unnamed.handle->has_outcome());
}

inline void the_only_named_source_may_come_by_another_connection() {
  NamingSide side(true);
  Remote again{handoff::PeerRole::source, {transport::Lane::mapped}};
  again.peer->epoch = side.left.peer->epoch;
  side.push(again);
  CHECK(again.count(handoff::Kind::claim) == 1);
  side.left.lose();
  side.book.on_peer_lost(side.left.peer);  // The one that it was to come by.
  CHECK(!side.handle->has_outcome());
  // Of several sources, only one that is for the same share.
  NamingSide two;
  Remote other{handoff::PeerRole::source, {transport::Lane::mapped}};
  other.peer->epoch = two.left.peer->epoch;
  two.push(other);
  CHECK(other.count(handoff::Kind::decline) == 1);
  other.peer->layout_template = two.left.peer->layout_template;
  two.push(other);
  CHECK(other.count(handoff::Kind::claim) == 1);
}

inline const std::pair<std::string, std::function<void()>> kPushOrders[] = {
    {"every_named_source_pushes_its_part_and_nobody_else", every_named_source_pushes_its_part_and_nobody_else},
    {"a_named_source_that_dies_before_it_pushes_ends_the_reservation",
     a_named_source_that_dies_before_it_pushes_ends_the_reservation},
    {"the_only_named_source_may_come_by_another_connection", the_only_named_source_may_come_by_another_connection},
    {"every_order_of_events_ends_a_push_once", every_order_of_events_ends_a_push_once},
    {"every_order_of_events_ends_a_reservation_once", every_order_of_events_ends_a_reservation_once},
};

}  // namespace kvlink::test
