// What must not happen again after a handoff has ended: its blocks are not given out while something writes them, and
// its id is not offered twice.
//
// Stands in for: handoff/reach.cpp
// Stands in for: transport/staged_sender.cpp
#include <memory>
#include <string>

#include "scripted_sides.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using kvlink::test::kSecond;
using kvlink::test::Remote;
using kvlink::test::SourceSide;
using kvlink::test::TargetSide;
using kvlink::test::transfers;

/// Neither time nor the loss of the connection proves that nothing writes any more.
void a_quarantine_ends_with_its_transfer_alone() {
  const auto side = std::make_unique<TargetSide>(kTransitions);
  Remote source(PeerRole::source, {transport::Lane::mapped});
  side->pull({source.peer});
  side->grant(0);
  transfers().front()->slow = true;
  side->services.quarantine.check(0);
  (void)side->book.turn(side->start + 11 * kSecond);
  CHECK(side->handle->result()->failure->code == Code::deadline_exceeded);
  source.lose();
  side->book.on_peer_lost(source.peer);
  side->book.on_refuse(source.peer, side->parts[0].attempt, {Code::cancelled, "scripted"});
  (void)side->book.turn(side->start + 1'000'000 * kSecond);
  CHECK(!side->handle->released());
  CHECK(side->services.holds->count().quarantined == 2);
  side->services.quarantine.check(2);
  CHECK(test::code_thrown_by([&] { side->services.quarantine.check(1); }) == Code::not_ready);
  CHECK(test::code_thrown_by([&] { side->services.holds->acquire_shared(test::kBlocks); }) == Code::blocks_busy);
  transfers().front()->broken = true;
  side->turn();
  CHECK(side->handle->released());
  side->services.quarantine.check(0);
  side->services.holds->acquire_exclusive(test::kBlocks);
}

void a_message_names_the_peers_of_the_quarantine() {
  Quarantine quarantine;
  for (std::uint32_t number = 0; number < 20; ++number) {
    quarantine.enter({.handoff = {}, .attempt = number}, 3, {"peer-" + std::to_string(number % 10)});
  }
  try {
    quarantine.check(59);
    CHECK(false);
  } catch (const Error& error) {
    const std::string text = error.what();
    CHECK(text.find("60 blocks of 20 pulls") != std::string::npos);
    CHECK(text.find("peer-0, peer-1, ") != std::string::npos);
    CHECK(text.find("peer-7 and 2 more") != std::string::npos);
  }
  quarantine.leave({.handoff = {}, .attempt = 3});
  quarantine.leave({.handoff = {}, .attempt = 3});
  quarantine.check(57);
}

/// Long after the reason is forgotten, and whoever made it.
void an_id_that_has_ended_is_neither_offered_nor_parked_again() {
  for (const std::uint8_t maker : {std::uint8_t{1}, std::uint8_t{2}}) {
    SourceSide side(kTransitions);
    Remote reader(PeerRole::claimant, {});
    side.id.epoch = {maker};
    for (int ended = 0; ended < 70'000; ++ended, ++side.id.sequence) {
      side.offer();
      side.book.cancel(side.id, {Code::cancelled, "scripted"});
      CHECK(side.handle->result()->failure->code == Code::cancelled);
    }
    for (const std::uint64_t sequence : {7U, 8U, 1000U, 70'000U}) {
      side.id.sequence = sequence;
      side.claim(reader, 1);
      CHECK(reader.count(Kind::refuse) == 1);
      side.offer();
      CHECK(side.handle->result()->failure->code == Code::invalid_argument);
      CHECK(side.handle->released());
    }
    CHECK(side.services.holds->count().shared == 0);
  }
}

}  // namespace

int main() {
#define NAMED(test) \
  {                 \
    #test, test     \
  }
  return test::run({
      NAMED(a_quarantine_ends_with_its_transfer_alone),
      NAMED(a_message_names_the_peers_of_the_quarantine),
      NAMED(an_id_that_has_ended_is_neither_offered_nor_parked_again),
  });
}
