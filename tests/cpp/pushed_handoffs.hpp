// Tests of the books of both sides with a push, for test_handoff_books.cpp.
#pragma once

#include "scripted_sides.hpp"

namespace kvlink::test {

/// The source side with a push of two tokens, one a block, to the first of two peers.
struct PushingSide : SourceSide {
  Remote first{handoff::PeerRole::claimant, {}};
  Remote second{handoff::PeerRole::claimant, {}};
  std::shared_ptr<handoff::PushState> state;

  explicit PushingSide(transport::Integrity integrity = transport::Integrity::none) : SourceSide(books_table) {
    handle = std::make_shared<handoff::Handoff>(handoff::Role::push, attempt(0), "", handoff::State::offered,
                                                services.bells);
    state = std::make_shared<handoff::PushState>(services.holds, geometry(), kTokens, false);
    state->add(kBlocks);
    ++services.counters.live;
    book.add({.handle = handle,
              .blocks = {},
              .num_tokens = kTokens,
              .expires_ns = start + 10 * kSecond,
              .ttl_ms = 10'000,
              .cap_ns = start + 10 * kSecond,
              .readers = 1,
              .integrity = integrity,
              .payload = {},
              .push = state,
              .reservation = {.epoch = {9}, .sequence = 4}});
    (void)book.turn(start);
    book.start_push(id, first.peer);
  }
  void ready(std::uint64_t first_token, std::uint64_t end_token) {
    state->announce(state->hold_back({}, first_token, end_token));
    book.tell_ready(id);
  }
  void commit() {
    state->commit({});
    book.tell_ready(id);
  }
  void fetch(const Remote& reader, std::uint32_t number) {
    book.on_fetch(reader.peer, attempt(number), {.pieces = {{{.block = 3, .token = 0, .tokens = 1}}}});
  }
  void decline(const Remote& remote) {
    book.on_decline(remote.peer, id, {.code = Code::already_claimed, .message = "scripted"});
  }
  [[nodiscard]] bool failed_with(Code code) const {
    const auto result = handle->result();
    return result && result->failure && result->failure->code == code && handle->released() &&
           services.holds->count().shared == 0 && services.counters.live == 0;
  }
};

/// The target side with a reservation of two tokens, and two nodes that may push.
struct ReservingSide : TargetSide {
  Remote first{handoff::PeerRole::source, {transport::Lane::mapped}};
  Remote second{handoff::PeerRole::source, {transport::Lane::mapped}};
  HandoffId reservation{.epoch = {1}, .sequence = 4};
  HandoffId pushed{.epoch = {2}, .sequence = 8};

  explicit ReservingSide(transport::Integrity integrity = transport::Integrity::none) : TargetSide(books_table) {
    const AttemptId attempt{.handoff = reservation, .attempt = 1};
    auto nobody = std::make_shared<handoff::Peer>();
    parts.push_back({.attempt = attempt, .peer = nobody});
    handle = std::make_shared<handoff::Handoff>(handoff::Role::reservation, attempt, "", handoff::State::reserved,
                                                services.bells);
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
                 .integrity = integrity,
                 .is_reservation = true});
  }
  void push(const Remote& remote, std::uint64_t tokens = kTokens) {
    book.on_push(remote.peer, reservation, {.offer = pushed, .num_tokens = tokens});
    if (tokens == kTokens) parts.front() = {.attempt = {.handoff = pushed, .attempt = 1}, .peer = remote.peer};
  }
  void begin(transport::Integrity integrity = transport::Integrity::none) {
    push(first);
    grant_summed(first.peer, 0, integrity);
    (void)first.received();
  }
  void ready(std::uint64_t first_token, std::uint64_t end_token, bool with_blocks = false) {
    ready_from(first, first_token, end_token, with_blocks);
  }
  void ready_from(const Remote& remote, std::uint64_t first_token, std::uint64_t end_token, bool with_blocks = false) {
    handoff::Ready said{
        .layers = {{.first = 0, .end = 1}}, .first_token = first_token, .end_token = end_token, .blocks = {}};
    if (with_blocks) said.blocks = {{0, 1}};
    book.on_piece(remote.peer, parts.front().attempt, said);
  }
  void commit() { book.on_commit(first.peer, parts.front().attempt, {std::byte{5}}); }
  /// The latest transfer has brought all of its bytes.
  void arrive() {
    transfers().back()->done = true;
    turn();
  }
  [[nodiscard]] bool failed_with(Code code) const {
    const auto result = handle->result();
    return result && result->failure && result->failure->code == code;
  }
};

inline void a_push_is_for_the_node_that_has_reserved() {
  PushingSide side;
  CHECK(side.first.count(handoff::Kind::push) == 1);
  side.claim(side.second, 1);
  CHECK(side.second.count(handoff::Kind::refuse) == 1);
  side.claim(side.first, 1);
  CHECK(side.first.count(handoff::Kind::grant) == 1);
}

inline void what_is_ready_is_told_once_there_is_a_grant_and_then_as_it_comes() {
  PushingSide side;
  side.ready(0, 1);
  CHECK(side.first.count(handoff::Kind::ready) == 0);
  side.claim(side.first, 1);
  CHECK(side.first.count(handoff::Kind::ready) == 1);
  side.ready(1, 2);
  const auto messages = side.first.received();
  CHECK(messages.size() == 1);
  CHECK(messages.front().kind == handoff::Kind::ready);
  side.commit();
  CHECK(side.first.count(handoff::Kind::commit) == 1);
}

inline void a_push_succeeds_only_after_its_owner_has_committed_it() {
  PushingSide early;
  early.claim(early.first, 1);
  early.book.on_confirm(early.first.peer, early.attempt(1), 64);
  CHECK(early.first.count(handoff::Kind::valid) == 0);
  PushingSide side;
  side.commit();
  side.claim(side.first, 1);
  side.book.on_confirm(side.first.peer, side.attempt(1), 64);
  CHECK(side.first.count(handoff::Kind::valid) == 1);
  CHECK(side.handle->state() == handoff::State::succeeded);
  CHECK(side.services.holds->count().shared == 0);
}

inline void a_push_ends_with_the_attempt_of_its_reader() {
  PushingSide given_up;
  given_up.claim(given_up.first, 1);
  given_up.book.on_cancel(given_up.first.peer, given_up.attempt(1));
  CHECK(given_up.failed_with(Code::cancelled));
  PushingSide lost;
  lost.claim(lost.first, 1);
  lost.first.lose();
  lost.book.on_peer_lost(lost.first.peer);
  CHECK(lost.failed_with(Code::peer_lost));
}

inline void a_push_that_nobody_has_claimed_ends_by_its_own_peer_alone() {
  for (const bool by_loss : {false, true}) {
    PushingSide side;
    side.decline(side.second);
    side.second.lose();
    side.book.on_peer_lost(side.second.peer);
    CHECK(!side.handle->has_outcome());
    if (by_loss) {
      side.first.lose();
      side.book.on_peer_lost(side.first.peer);
    } else {
      side.decline(side.first);
    }
    CHECK(side.failed_with(by_loss ? Code::peer_lost : Code::already_claimed));
  }
  PushingSide granted;
  granted.claim(granted.first, 1);
  granted.decline(granted.first);
  CHECK(granted.stale() == 1);
  CHECK(!granted.handle->has_outcome());
}

inline void a_reader_fetches_a_push_piece_by_piece_and_an_offer_once() {
  PushingSide side;
  side.claim(side.first, 1);
  side.fetch(side.first, 1);
  side.fetch(side.first, 1);
  CHECK(senders_made() == 2);
  side.fetch(side.first, 2);
  side.fetch(side.second, 1);
  CHECK(senders_made() == 2);
  CHECK(side.stale() == 2);
  CHECK(!side.handle->has_outcome());

  SourceSide offered(books_table);
  Remote reader{handoff::PeerRole::claimant, {}};
  offered.offer();
  offered.claim(reader, 1);
  for (int i = 0; i < 2; ++i) {
    offered.book.on_fetch(reader.peer, offered.attempt(1), {.pieces = {{{.block = 3, .token = 0, .tokens = 1}}}});
  }
  CHECK(senders_made() == 1);
  CHECK(offered.stale() == 1);
}

inline void a_push_that_was_fetched_is_summed_once_for_its_own_reader() {
  PushingSide side(transport::Integrity::crc32c);
  side.commit();
  side.claim(side.first, 1);
  side.fetch(side.first, 1);
  side.check(side.second, 1);
  side.check(side.first, 2);
  CHECK(side.stale() == 2);
  (void)side.first.received();
  side.check(side.first, 1);
  side.check(side.first, 1);
  CHECK(side.stale() == 3);
  (void)side.book.turn(side.start);
  (void)side.book.turn(side.start);
  CHECK(side.first.count(handoff::Kind::sums) == 1);
  PushingSide plain;
  plain.claim(plain.first, 1);
  plain.fetch(plain.first, 1);
  plain.check(plain.first, 1);
  CHECK(plain.stale() == 1);
}

inline void a_reservation_takes_the_first_push_that_fits() {
  ReservingSide side;
  side.push(side.second, kTokens + 1);
  CHECK(side.second.count(handoff::Kind::decline) == 1);
  Remote partial{handoff::PeerRole::source, {transport::Lane::mapped}, true};
  side.services.own_template = geometry();
  side.push(partial);
  CHECK(partial.count(handoff::Kind::decline) == 1);
  Remote unreachable{handoff::PeerRole::source, {}};
  side.push(unreachable);
  CHECK(unreachable.count(handoff::Kind::decline) == 1);
  CHECK(side.handle->state() == handoff::State::reserved);
  side.push(side.first);
  CHECK(side.first.count(handoff::Kind::claim) == 1);
  side.push(side.second);
  CHECK(side.second.count(handoff::Kind::decline) == 1);
  side.book.on_push(side.second.peer, {.epoch = {1}, .sequence = 99}, {.offer = side.pushed, .num_tokens = kTokens});
  CHECK(side.second.count(handoff::Kind::decline) == 1);
  CHECK(!side.handle->has_outcome());
}

inline void pieces_move_one_after_another_and_success_comes_after_all() {
  ReservingSide side;
  side.begin();
  CHECK(transfers().empty());
  CHECK(side.handle->state() == handoff::State::filling);
  side.ready(1, 2, true);
  CHECK(transfers().size() == 1);
  side.ready(0, 1);
  CHECK(transfers().size() == 1);  // It waits until the first one has arrived.
  side.turn();
  CHECK(side.handle->state() == handoff::State::moving);
  side.commit();
  CHECK(side.first.count(handoff::Kind::confirm) == 0);
  side.arrive();
  CHECK(transfers().size() == 2);
  CHECK(side.first.count(handoff::Kind::confirm) == 0);
  side.arrive();
  CHECK(side.first.count(handoff::Kind::confirm) == 1);
  side.valid(0);
  CHECK(side.handle->state() == handoff::State::succeeded);
  CHECK(side.handle->result()->bytes == kTokens * kBlockBytes);
  CHECK(side.handle->result()->payload == std::vector{std::byte{5}});
}

inline void a_push_is_confirmed_only_after_commit() {
  ReservingSide side;
  side.begin();
  side.ready(0, 2, true);
  side.arrive();
  CHECK(side.first.received().empty());
  CHECK(side.handle->state() == handoff::State::filling);
  side.commit();
  const auto messages = side.first.received();
  CHECK(messages.size() == 1);  // No CHECK: there is no integrity.
  CHECK(messages.front().kind == handoff::Kind::confirm);
}

inline void a_push_with_integrity_is_checked_after_commit() {
  constexpr auto crc = transport::Integrity::crc32c;
  ReservingSide side(crc);
  side.begin(crc);
  side.ready(0, 2, true);
  CHECK(side.first.count(handoff::Kind::check) == 0);
  side.arrive();
  CHECK(side.first.count(handoff::Kind::check) == 0);
  side.commit();
  CHECK(side.first.count(handoff::Kind::check) == 1);
  CHECK(side.handle->state() == handoff::State::checking);
  side.sums(side.first.peer, 0);
  side.turn();
  CHECK(side.first.count(handoff::Kind::confirm) == 1);
}

/// A source that says something twice, or commits what is not ready, cannot be trusted.
inline void a_source_that_contradicts_itself_fails_the_reservation() {
  const auto fails = [](const std::function<void(ReservingSide&)>& says) {
    ReservingSide side;
    side.begin();
    side.ready(0, 1, true);
    CHECK(!side.handle->has_outcome());
    says(side);
    CHECK(side.failed_with(Code::protocol_error));
  };
  fails([](auto& side) { side.ready(0, 1); });
  fails([](auto& side) { side.ready(0, 2); });
  fails([](auto& side) { side.ready(1, 3); });
  fails([](auto& side) { side.ready(1, 2, true); });  // More blocks than the request has.
  fails([](auto& side) { side.commit(); });
  fails([](auto& side) {
    side.ready(1, 2);
    side.commit();
    side.commit();
  });
  fails([](auto& side) {
    side.book.on_piece(side.first.peer, side.parts.front().attempt,
                       {.layers = {{.first = 1, .end = 2}}, .first_token = 1, .end_token = 2, .blocks = {}});
  });
}

inline void a_reservation_listens_only_to_the_node_that_pushes() {
  ReservingSide side;
  side.push(side.first);
  side.grant_from(side.second.peer, 0);
  CHECK(side.stale() == 1);
  side.grant(0);
  side.ready_from(side.second, 0, 1, true);
  side.book.on_commit(side.second.peer, side.parts.front().attempt, {});
  CHECK(side.stale() == 3);
  CHECK(transfers().empty());
  side.ready(0, 2, true);
  side.book.on_commit(side.second.peer, side.parts.front().attempt, {});
  side.arrive();
  CHECK(side.first.count(handoff::Kind::confirm) == 0);
  CHECK(!side.handle->has_outcome());
}

/// Each of these ends it, whatever it is at, with one outcome; and no transfer is left.
inline void whatever_ends_a_reservation_ends_it_once() {
  using Say = std::function<void(ReservingSide&)>;
  const Say begun[] = {[](auto&) {}, [](auto& side) { side.push(side.first); }, [](auto& side) { side.begin(); },
                       [](auto& side) {
                         side.begin();
                         side.ready(0, 1, true);
                       }};
  const Say ends[] = {[](auto& side) { side.book.cancel(side.handle->id(), {Code::cancelled, "scripted"}); },
                      [](auto& side) { (void)side.book.turn(side.start + 11 * kSecond); },
                      [](auto& side) { side.book.close_all({Code::closed, "scripted"}); }};
  for (const Say& begin : begun) {
    for (const Say& end : ends) {
      for (const Say& late : ends) {
        ReservingSide side;
        begin(side);
        end(side);
        CHECK(side.handle->has_outcome());
        late(side);
        side.push(side.second);
        CHECK(side.second.count(handoff::Kind::decline) == 1);
        side.turn();
        CHECK(side.handle->released());
        CHECK(side.ended() == 1);
        CHECK(side.services.counters.live == 0);
        CHECK(side.services.holds->count().exclusive == 0);
        CHECK(side.book.drained());
      }
    }
  }
}

inline const std::pair<std::string, std::function<void()>> kPushedHandoffs[] = {
    {"a_push_is_for_the_node_that_has_reserved", a_push_is_for_the_node_that_has_reserved},
    {"what_is_ready_is_told_once_there_is_a_grant_and_then_as_it_comes",
     what_is_ready_is_told_once_there_is_a_grant_and_then_as_it_comes},
    {"a_push_succeeds_only_after_its_owner_has_committed_it", a_push_succeeds_only_after_its_owner_has_committed_it},
    {"a_push_ends_with_the_attempt_of_its_reader", a_push_ends_with_the_attempt_of_its_reader},
    {"a_push_that_nobody_has_claimed_ends_by_its_own_peer_alone",
     a_push_that_nobody_has_claimed_ends_by_its_own_peer_alone},
    {"a_reader_fetches_a_push_piece_by_piece_and_an_offer_once",
     a_reader_fetches_a_push_piece_by_piece_and_an_offer_once},
    {"a_push_that_was_fetched_is_summed_once_for_its_own_reader",
     a_push_that_was_fetched_is_summed_once_for_its_own_reader},
    {"a_reservation_takes_the_first_push_that_fits", a_reservation_takes_the_first_push_that_fits},
    {"pieces_move_one_after_another_and_success_comes_after_all",
     pieces_move_one_after_another_and_success_comes_after_all},
    {"a_push_is_confirmed_only_after_commit", a_push_is_confirmed_only_after_commit},
    {"a_push_with_integrity_is_checked_after_commit", a_push_with_integrity_is_checked_after_commit},
    {"a_source_that_contradicts_itself_fails_the_reservation", a_source_that_contradicts_itself_fails_the_reservation},
    {"a_reservation_listens_only_to_the_node_that_pushes", a_reservation_listens_only_to_the_node_that_pushes},
    {"whatever_ends_a_reservation_ends_it_once", whatever_ends_a_reservation_ends_it_once},
};

}  // namespace kvlink::test
