// Tests of the books of both sides with integrity, for test_handoff_books.cpp.
#pragma once

#include "scripted_sides.hpp"

namespace kvlink::test {

inline constexpr auto kCrc = transport::Integrity::crc32c;

/// The source side with an offer that has integrity, and two readers.
struct SummedOffer : SourceSide {
  Remote first{handoff::PeerRole::claimant, {}};
  Remote second{handoff::PeerRole::claimant, {}};
  explicit SummedOffer(transport::Integrity integrity = kCrc, std::uint32_t readers = 1) : SourceSide(books_table) {
    offer(readers, 10, 300, integrity);
  }
  void turn() { (void)book.turn(start); }
};

/// The target side with a pull that demands integrity, granted by all of its sources.
struct CheckedPull : TargetSide {
  Remote left{handoff::PeerRole::source, {transport::Lane::mapped}};
  Remote right{handoff::PeerRole::source, {transport::Lane::mapped}};
  explicit CheckedPull(std::size_t sources = 1) : TargetSide(books_table) {
    pull(sources == 1 ? std::vector{left.peer} : std::vector{left.peer, right.peer}, std::nullopt, kCrc);
    for (std::size_t part = 0; part < sources; ++part) grant_summed(parts[part].peer, part, kCrc);
  }
  void arrive(std::size_t part) {
    transfers()[part]->done = true;
    turn();
  }
};

inline void a_source_sums_for_its_reader_once() {
  // By its owner's wish, or by the reader's.
  for (const auto offered : {transport::Integrity::none, kCrc}) {
    SummedOffer side(offered);
    side.claim(side.first, 1, kTokens, offered == kCrc ? transport::Integrity::none : kCrc);
    side.check(side.first, 1);
    side.turn();
    const auto messages = side.first.received();
    const auto sums = std::ranges::find(messages, handoff::Kind::sums, &Message::kind);
    CHECK(sums != messages.end());
    CHECK(sums->body.size() == 8 + 2 * 4);  // where they begin, and two sums
    side.turn();
    CHECK(side.first.count(handoff::Kind::sums) == 0);
    side.check(side.first, 1);
    CHECK(side.stale() == 1);
    CHECK(side.book.drained());
    side.book.on_confirm(side.first.peer, side.attempt(1), 64);
    CHECK(side.first.count(handoff::Kind::valid) == 1);
  }
}

inline void a_grant_without_integrity_sums_nothing() {
  SummedOffer side(transport::Integrity::none);
  side.claim(side.first, 1);
  side.check(side.first, 1);
  side.turn();
  CHECK(side.stale() == 1);
  CHECK(side.first.count(handoff::Kind::sums) == 0);
}

inline void a_check_is_for_its_own_grant() {
  SummedOffer side;
  side.claim(side.first, 1);
  side.check(side.second, 1);
  side.check(side.first, 2);
  CHECK(side.stale() == 2);
  side.check(side.first, 1);
  CHECK(side.stale() == 2);
  side.turn();
  CHECK(side.first.count(handoff::Kind::sums) == 1);
  CHECK(side.second.count(handoff::Kind::sums) == 0);
}

inline void sums_are_sent_only_to_whom_holds_the_grant() {
  for (const bool same_reader : {true, false}) {
    SummedOffer side(kCrc, 2);
    Remote& other = same_reader ? side.first : side.second;
    const std::uint32_t number = same_reader ? 2 : 1;
    side.claim(side.first, 1);
    side.claim(other, number);
    side.check(side.first, 1);
    side.check(other, number);
    side.book.on_cancel(side.first.peer, side.attempt(1));
    side.turn();
    CHECK(other.count(handoff::Kind::sums) == 1);
    CHECK(same_reader || side.first.count(handoff::Kind::sums) == 0);
    CHECK(side.book.drained());
  }
}

inline void a_pull_confirms_only_what_was_compared() {
  for (const bool sums_first : {true, false}) {
    CheckedPull side;
    CHECK(side.left.count(handoff::Kind::check) == 1);
    if (sums_first) side.sums(side.left.peer, 0);
    side.turn();
    CHECK(side.handle->state() == handoff::State::moving);
    side.arrive(0);
    if (!sums_first) {
      CHECK(side.handle->state() == handoff::State::checking);
      side.turn();
      CHECK(side.left.count(handoff::Kind::confirm) == 0);
      side.sums(side.left.peer, 0);
    }
    CHECK(side.left.count(handoff::Kind::confirm) == 1);
    side.valid(0);
    CHECK(side.handle->state() == handoff::State::succeeded);
  }
}

inline void a_pull_without_integrity_asks_for_no_sums() {
  TargetSide side(books_table);
  Remote remote{handoff::PeerRole::source, {transport::Lane::mapped}};
  side.pull({remote.peer});
  side.grant(0);
  CHECK(remote.count(handoff::Kind::check) == 0);
  transfers()[0]->done = true;
  side.turn();
  CHECK(remote.count(handoff::Kind::confirm) == 1);
}

inline void sums_of_another_source_are_not_taken() {
  CheckedPull side;
  side.arrive(0);
  side.sums(side.right.peer, 0);
  CHECK(side.stale() == 1);
  CHECK(side.handle->state() == handoff::State::checking);
  side.sums(side.left.peer, 0);
  side.valid(0);
  side.sums(side.left.peer, 0);  // late: the pull has ended
  CHECK(side.stale() == 2);
  CHECK(side.handle->state() == handoff::State::succeeded);
}

inline void sums_that_were_not_asked_for_end_the_pull() {
  for (const bool moved : {true, false}) {
    CheckedPull side;
    if (moved) side.arrive(0);
    side.sums(side.left.peer, 0);
    side.sums(side.left.peer, 0);
    CHECK(side.handle->result()->failure->code == Code::protocol_error);
  }
  TargetSide plain(books_table);
  Remote remote{handoff::PeerRole::source, {transport::Lane::mapped}};
  plain.pull({remote.peer});
  plain.grant(0);
  plain.sums(remote.peer, 0);
  CHECK(plain.handle->result()->failure->code == Code::protocol_error);
}

inline void a_source_that_grants_without_what_is_demanded_is_refused() {
  for (const auto granted : {transport::Integrity::none, transport::Integrity::xxh3}) {
    TargetSide side(books_table);
    Remote remote{handoff::PeerRole::source, {transport::Lane::mapped}};
    side.pull({remote.peer}, std::nullopt, kCrc);
    side.grant_summed(remote.peer, 0, granted);
    CHECK(side.handle->result()->failure->code == Code::protocol_error);
    CHECK(transfers().empty());
  }
}

inline void what_differs_is_named_and_nothing_else() {
  CheckedPull side;
  side.arrive(0);
  side.sums(side.left.peer, 0, 1, 2);
  const auto result = side.handle->result();
  CHECK(result && result->failure->code == Code::data_corrupted);
  CHECK(result->failed.size() == 1);
  CHECK(result->failed[0].first_token == 1 && result->failed[0].end_token == 2);
  CHECK(result->valid_prefix_tokens == 1);
  CHECK(side.left.count(handoff::Kind::confirm) == 0);
  CHECK(side.handle->released());
}

inline void what_differs_is_told_when_every_source_has_been_checked() {
  CheckedPull side(2);
  side.arrive(0);
  side.sums(side.left.peer, 0, 0, 1);
  CHECK(!side.handle->has_outcome());
  side.arrive(1);
  side.sums(side.right.peer, 1, 1, 2);
  const auto result = side.handle->result();
  CHECK(result && result->failure->code == Code::data_corrupted);
  CHECK(result->failed.size() == 2);
  CHECK(side.left.count(handoff::Kind::confirm) + side.right.count(handoff::Kind::confirm) == 0);
}

inline void what_was_checked_is_right_though_the_pull_fails() {
  CheckedPull side;
  side.arrive(0);
  side.sums(side.left.peer, 0);
  side.left.lose();
  side.book.on_peer_lost(side.left.peer);
  const auto result = side.handle->result();
  CHECK(result && result->failure->code == Code::peer_lost);
  CHECK(result->failed.empty());
  CHECK(result->valid_prefix_tokens == kTokens);

  CheckedPull two(2);
  two.arrive(0);
  two.sums(two.left.peer, 0);
  two.right.lose();
  two.book.on_peer_lost(two.right.peer);
  CHECK(two.handle->result()->failed.size() == 1);
  CHECK(two.handle->result()->valid_prefix_tokens == 0);
}

inline const Tests kCheckedHandoffs{
    {"a_source_sums_for_its_reader_once", a_source_sums_for_its_reader_once},
    {"a_grant_without_integrity_sums_nothing", a_grant_without_integrity_sums_nothing},
    {"a_check_is_for_its_own_grant", a_check_is_for_its_own_grant},
    {"sums_are_sent_only_to_whom_holds_the_grant", sums_are_sent_only_to_whom_holds_the_grant},
    {"a_pull_confirms_only_what_was_compared", a_pull_confirms_only_what_was_compared},
    {"a_pull_without_integrity_asks_for_no_sums", a_pull_without_integrity_asks_for_no_sums},
    {"sums_of_another_source_are_not_taken", sums_of_another_source_are_not_taken},
    {"sums_that_were_not_asked_for_end_the_pull", sums_that_were_not_asked_for_end_the_pull},
    {"a_source_that_grants_without_what_is_demanded_is_refused",
     a_source_that_grants_without_what_is_demanded_is_refused},
    {"what_differs_is_named_and_nothing_else", what_differs_is_named_and_nothing_else},
    {"what_differs_is_told_when_every_source_has_been_checked",
     what_differs_is_told_when_every_source_has_been_checked},
    {"what_was_checked_is_right_though_the_pull_fails", what_was_checked_is_right_though_the_pull_fails},
};

}  // namespace kvlink::test
