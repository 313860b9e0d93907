// The staged lane without a network: hostile chunks are refused, honest ones land, and what was lent is given back.
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvlink/transport/chunk_pool.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/copy_staging.hpp"
#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/staged_receiver.hpp"
#include "kvlink/transport/stream_coverage.hpp"
#include "kvlink/transport/waker.hpp"
#include "scattered.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

constexpr std::uint32_t kWindow = 4;
const AttemptId kAttempt{.handoff = {.epoch = {1, 2, 3}, .sequence = 7}, .attempt = 2};

/// Counts what was given back to it.
class Lender final : public ReceivedData::Owner {
 public:
  void release(const void* /*data*/) noexcept override { ++released; }
  std::atomic<int> released{0};
};

/// A target of 16 scattered blocks, and what its blocks must become.
struct Target {
  test::Scattered shape{.block_bytes = 1000, .blocks = 20, .moved = 16};
  std::shared_ptr<const plan::Plan> plan = shape.plan(11);
  std::vector<std::byte> source = std::vector<std::byte>(shape.pool_bytes());
  std::vector<std::byte> memory = std::vector<std::byte>(shape.pool_bytes());
  std::vector<std::byte> untouched;
  std::vector<std::byte> expected;
  std::vector<std::byte> stream;
  Waker waker;
  std::shared_ptr<Lender> lender = std::make_shared<Lender>();
  CopyThreads threads{2};
  std::shared_ptr<StagedReceiver> receiver;
  ChunkRouter router;
  bool shown;    // not lent: the bytes are there only while the call lasts
  int sent = 0;  // and lent

  explicit Target(bool only_shown = false) : shown(only_shown) {
    test::fill(source.data(), source.size(), 1);
    test::fill(memory.data(), memory.size(), 2);
    untouched = memory;
    expected = memory;
    test::copy_by_the_book(*plan, source.data(), expected.data());
    stream.resize(plan->total_bytes());
    gather(*plan, 0, stream.size(), LocalMemory({{source.data(), source.size()}}), stream.data());
    auto local = std::make_shared<LocalMemory>(std::vector<LocalRegion>{{memory.data(), memory.size()}});
    receiver = StagedReceiver::create(plan, local, kWindow, threads, waker);
    receiver->start();
    router.attach(kAttempt, receiver);
  }

  void send(std::uint64_t begin, std::uint32_t length, const AttemptId& attempt = kAttempt) {
    const auto header = ChunkHeader{.attempt = attempt, .stream_begin = begin, .length = length}.encode();
    // A range outside of the stream is sent from the start of it: the header is what must be refused.
    const std::byte* const data = stream.data() + (begin <= stream.size() - length ? begin : 0);
    if (shown) {
      std::vector<std::byte> passing(data, data + length);
      router.deliver(header, ReceivedData::shown(passing));
      std::ranges::fill(passing, std::byte{0xee});
      return;
    }
    ++sent;
    router.deliver(header, ReceivedData(lender, {data, length}));
  }

  /// Runs the receiver until it drains or the time is up.
  void run() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!receiver->drained() && std::chrono::steady_clock::now() < until) turn();
  }

  void turn() {
    if (receiver->advance()) return;
    pollfd bell{.fd = waker.fd(), .events = POLLIN, .revents = 0};
    ::poll(&bell, 1, 20);
    waker.clear();
  }

  /// The receiver may hold no more than what was sent and not given back.
  void expect_all_given_back() {
    router.detach(kAttempt);
    receiver.reset();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (lender->released != sent && std::chrono::steady_clock::now() < until) ::poll(nullptr, 0, 1);
    CHECK(lender->released == sent);
  }

  void expect_failure(Code code) {
    run();
    CHECK(receiver->drained());
    CHECK(receiver->failure().has_value());
    CHECK(receiver->failure()->code == code);
    CHECK(receiver->moved_bytes() < plan->total_bytes());
    CHECK(!receiver->missing().empty());
    expect_all_given_back();
  }
};

void chunks_in_any_order_land_in_their_blocks(bool shown) {
  Target target(shown);
  std::vector<std::uint64_t> begins;
  constexpr std::uint32_t kChunk = 777;
  for (std::uint64_t begin = 0; begin < target.stream.size(); begin += kChunk) begins.push_back(begin);
  std::shuffle(begins.begin(), begins.end(), std::mt19937(3));
  std::uint32_t credit = kWindow;
  for (const std::uint64_t begin : begins) {
    for (; credit == 0; credit += target.receiver->take_credits()) target.turn();
    target.send(begin, static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunk, target.stream.size() - begin)));
    --credit;
  }
  target.run();
  CHECK(target.receiver->drained());
  CHECK(!target.receiver->failure());
  CHECK(target.receiver->moved_bytes() == target.plan->total_bytes());
  CHECK(target.receiver->missing().empty());
  CHECK(target.memory == target.expected);
  target.expect_all_given_back();
}

void a_chunk_that_is_only_shown_lies_in_its_blocks_when_the_call_returns() {
  Target target(true);
  target.send(0, static_cast<std::uint32_t>(target.stream.size()));
  CHECK(target.memory == target.expected);
  CHECK(target.receiver->advance());  // or a node without another message would sleep on it
  CHECK(target.receiver->drained() && target.receiver->take_credits() == 1);
}

void a_chunk_sent_twice_fails_the_transfer(bool shown) {
  Target target(shown);
  target.send(0, 500);
  target.send(499, 2);
  target.expect_failure(Code::protocol_error);
}

void a_chunk_outside_of_the_plan_fails_the_transfer_and_writes_nothing(bool shown) {
  for (const auto& [begin, length] :
       {std::pair<std::uint64_t, std::uint32_t>{15'999, 2}, {16'000, 1}, {~0ULL, 1}, {~0ULL - 3, 400}}) {
    Target target(shown);
    target.send(begin, length);
    target.expect_failure(Code::protocol_error);
    CHECK(target.memory == target.untouched);
  }
}

void a_source_that_ignores_the_window_fails_the_transfer(bool shown) {
  Target target(shown);
  for (std::uint32_t index = 0; index <= kWindow; ++index) target.send(index * 100, 100);
  target.expect_failure(Code::protocol_error);
}

void a_cancelled_transfer_drains_and_writes_nothing_later(bool shown) {
  Target target(shown);
  target.send(0, 1000);
  target.receiver->cancel();
  target.run();
  CHECK(target.receiver->drained());
  const auto memory = target.memory;
  target.send(1000, 1000);
  target.turn();
  CHECK(target.memory == memory);
  CHECK(!target.receiver->failure());
  target.expect_all_given_back();
}

void chunks_that_nobody_waits_for_are_counted_and_given_back() {
  Target target;
  AttemptId other = kAttempt;
  other.attempt = 1;
  target.send(0, 10, other);
  other = kAttempt;
  other.handoff.epoch[15] = 9;
  target.send(0, 10, other);
  CHECK(target.router.dropped() == 2);
  target.router.detach(kAttempt);
  target.send(0, 10);
  CHECK(target.router.dropped() == 3);
  CHECK(target.lender->released == 3);
  CHECK(target.memory == target.untouched);
}

void headers_are_read_only_if_they_are_exactly_right() {
  const ChunkHeader header{.attempt = kAttempt, .stream_begin = 0x0102030405060708, .length = 0x0a0b0c0d};
  const auto encoded = header.encode();
  const auto decoded = ChunkHeader::decode(encoded);
  CHECK(decoded && decoded->attempt == kAttempt && decoded->stream_begin == header.stream_begin &&
        decoded->length == header.length);
  for (std::size_t length = 0; length < encoded.size(); ++length) {
    CHECK(!ChunkHeader::decode(std::span(encoded).first(length)));
  }
  std::vector<std::byte> longer(encoded.begin(), encoded.end());
  longer.push_back({});
  CHECK(!ChunkHeader::decode(longer));
  auto other_version = encoded;
  other_version[3] = std::byte{2};
  CHECK(!ChunkHeader::decode(other_version));
}

void a_header_that_lies_about_the_length_is_refused() {
  Target target;
  const auto header = ChunkHeader{.attempt = kAttempt, .stream_begin = 0, .length = 10}.encode();
  target.router.deliver(header, ReceivedData(target.lender, {target.stream.data(), 9}));
  target.router.deliver({}, ReceivedData(target.lender, {target.stream.data(), 9}));
  CHECK(target.router.dropped() == 2);
  CHECK(target.lender->released == 2);
}

void coverage_agrees_with_a_set_of_bytes() {
  std::mt19937 random(20);
  for (int round = 0; round < 200; ++round) {
    constexpr std::uint64_t kTotal = 40;
    StreamCoverage coverage(kTotal);
    std::array<bool, kTotal> bytes{};
    for (int step = 0; step < 30; ++step) {
      const StreamRange range{random() % (kTotal + 4), random() % (kTotal + 4)};
      bool fits = range.begin < range.end && range.end <= kTotal;
      for (auto at = range.begin; fits && at < range.end; ++at) fits = !bytes[at];
      CHECK(coverage.add(range) == fits);
      for (auto at = range.begin; fits && at < range.end; ++at) bytes[at] = true;
    }
    std::array<bool, kTotal> gaps{};
    for (const auto& gap : coverage.missing()) {
      for (auto at = gap.begin; at < gap.end; ++at) gaps[at] = true;
    }
    const auto covered = static_cast<std::uint64_t>(std::count(bytes.begin(), bytes.end(), true));
    for (std::size_t at = 0; at < kTotal; ++at) CHECK(gaps[at] != bytes[at]);
    CHECK(coverage.covered_bytes() == covered && coverage.complete() == (covered == kTotal));
  }
}

void a_pool_lends_up_to_its_limit_and_no_further() {
  const auto pool = std::make_shared<ChunkPool>(64, 2);
  auto first = pool->borrow();
  const auto* const place = first.data();
  const auto second = pool->borrow();
  CHECK(first && second && !pool->borrow() && pool->lent() == 2);
  first = {};
  const auto again = pool->borrow();
  CHECK(again && again.data() == place && pool->lent() == 2);
}

}  // namespace

int main() {
  test::Tests tests;
  for (const bool shown : {false, true}) {
    const std::string how = shown ? ", where they are only shown" : ", where they are lent";
    tests.insert(
        tests.end(),
        {{"chunks in any order land in their blocks" + how, [=] { chunks_in_any_order_land_in_their_blocks(shown); }},
         {"a chunk sent twice fails the transfer" + how, [=] { a_chunk_sent_twice_fails_the_transfer(shown); }},
         {"a chunk outside of the plan fails the transfer and writes nothing" + how,
          [=] { a_chunk_outside_of_the_plan_fails_the_transfer_and_writes_nothing(shown); }},
         {"a source that ignores the window fails the transfer" + how,
          [=] { a_source_that_ignores_the_window_fails_the_transfer(shown); }},
         {"a cancelled transfer drains and writes nothing later" + how,
          [=] { a_cancelled_transfer_drains_and_writes_nothing_later(shown); }}});
  }
  const test::Tests others = {
      {"a chunk that is only shown lies in its blocks when the call returns",
       a_chunk_that_is_only_shown_lies_in_its_blocks_when_the_call_returns},
      {"chunks that nobody waits for are counted and given back",
       chunks_that_nobody_waits_for_are_counted_and_given_back},
      {"headers are read only if they are exactly right", headers_are_read_only_if_they_are_exactly_right},
      {"a header that lies about the length is refused", a_header_that_lies_about_the_length_is_refused},
      {"coverage agrees with a set of bytes", coverage_agrees_with_a_set_of_bytes},
      {"a pool lends up to its limit and no further", a_pool_lends_up_to_its_limit_and_no_further}};
  tests.insert(tests.end(), others.begin(), others.end());
  return test::run(tests);
}
