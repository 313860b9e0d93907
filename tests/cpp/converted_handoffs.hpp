// Tests of the target's book where what arrives is converted, for test_handoff_books.cpp.
#pragma once

#include <array>
#include <chrono>
#include <cstring>
#include <future>

#include "kvlink/transport/integrity.hpp"
#include "scripted_sides.hpp"

namespace kvlink::test {

inline constexpr std::uint32_t kFew = 16;
inline constexpr std::uint32_t kMany = 20'000;  // two blocks of them are too many to be converted at once

/// A source of float32 for a target that keeps float16, one layer of blocks with one token of `elements` each.
inline void convert(handoff::Peer& peer, std::uint32_t elements) {
  const auto side = [elements](std::uint32_t region, std::uint64_t bytes) {
    return plan::Side{.region = region,
                      .offset = 0,
                      .block_stride = elements * bytes,
                      .token_stride = elements * bytes,
                      .head_stride = 0,
                      .dim_stride = bytes};
  };
  plan::Op op;
  op.dims = elements;
  plan::GroupGeometry group;
  group.name = "full";
  group.source_block_tokens = group.target_block_tokens = 1;
  group.source_num_blocks = group.target_num_blocks = 8;
  const std::uint64_t own = 8 * std::uint64_t{elements} * 2;
  op.element_bytes = 4;
  op.source = side(0, 4);
  op.target = side(1, 4);
  const std::vector<std::string> layers{"layer"};
  const std::vector groups{group};
  using Sizes = std::vector<std::uint64_t>;
  peer.layout_template =
      std::make_shared<const plan::Template>(std::vector{op}, groups, layers, Sizes{2 * own}, Sizes{own, 2 * own});
  op.element_bytes = 2;
  op.source = op.target = side(0, 2);
  peer.conversion = std::make_shared<const plan::Conversion>(
      std::make_shared<const plan::Template>(std::vector{op}, groups, layers, Sizes{own}, Sizes{own}),
      std::vector{plan::DtypePair{.from = plan::Dtype::float32, .to = plan::Dtype::float16}}, 2 * own);
}

/// Keeps the one copy thread of a node busy until it is opened.
class Gate {
 public:
  explicit Gate(transport::CopyThreads& threads) : threads_(threads) {
    const auto opened = opened_.get_future().share();
    CHECK(threads_.submit_once([opened] { opened.wait_for(std::chrono::seconds(60)); }));
  }
  /// Returns once the thread has done what was queued before this.
  void open() {
    opened_.set_value();
    std::promise<void> passed;
    const auto done = passed.get_future();
    CHECK(threads_.submit_once([&passed] { passed.set_value(); }));
    CHECK(done.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  }

 private:
  transport::CopyThreads& threads_;
  std::promise<void> opened_;
};

/// Memory for a conversion of `elements` a block, whose gate keeps all copies from being made.
inline std::unique_ptr<Gate> hold_conversion(TargetSide& side, handoff::Peer& peer, std::uint32_t elements) {
  convert(peer, elements);
  side.memory.assign(8 * std::size_t{elements} * 2, std::byte{7});
  side.services.memory = std::make_shared<transport::LocalMemory>(
      std::vector<transport::LocalRegion>{{.base = side.memory.data(), .bytes = side.memory.size()}});
  return std::make_unique<Gate>(*side.services.copy_threads);
}

/// The target side with a pull of which everything but its bytes is here.
struct ConvertedPull : TargetSide {
  Remote remote{handoff::PeerRole::source, {transport::Lane::mapped}};
  std::uint32_t elements;
  std::unique_ptr<Gate> gate;
  explicit ConvertedPull(std::uint32_t many, transport::Integrity integrity = transport::Integrity::none,
                         std::size_t sources = 1)
      : TargetSide(books_table, {.peer_bytes = 1}), elements(many), gate(hold_conversion(*this, *remote.peer, many)) {
    pull(std::vector(sources, remote.peer), std::nullopt, integrity);
    for (std::size_t part = 0; part < sources; ++part) grant_summed(remote.peer, part, integrity);
  }
  /// Both blocks come, full of 1.5.
  void arrive() {
    const std::vector<float> block(elements, 1.5F);
    for (const std::uint64_t number : {0U, 1U}) {  // in scratch memory, where they lie together
      std::memcpy(transfers()[0]->memory->at(1, number * elements * 4), block.data(), elements * 4);
    }
    transfers()[0]->done = true;
    turn();
  }
  /// Of the first bytes of a block, as this side keeps them.
  [[nodiscard]] std::uint16_t first_of(std::size_t block) const {
    std::uint16_t bits = 0;
    std::memcpy(&bits, memory.data() + block * elements * 2, sizeof bits);
    return bits;
  }
  [[nodiscard]] bool is_untouched() const {
    return std::ranges::all_of(memory, [](std::byte each) { return each == std::byte{7}; });
  }
};

inline constexpr std::uint16_t kOneAndAHalf = 0x3e00;  // in float16
inline constexpr std::uint16_t kUntouched = 0x0707;

inline void a_few_elements_are_converted_at_once_and_only_where_they_belong() {
  ConvertedPull side(kFew);
  CHECK(side.is_untouched());
  side.arrive();
  CHECK(side.remote.count(handoff::Kind::confirm) == 1);
  for (std::size_t block = 0; block < 8; ++block) {
    CHECK(side.first_of(block) == (block == 3 || block == 5 ? kOneAndAHalf : kUntouched));
  }
  side.valid(0);
  CHECK(side.handle->state() == handoff::State::succeeded);
  side.gate->open();
}

inline void scratch_memory_is_given_back_once_it_is_converted() {
  ConvertedPull side(kFew);
  side.arrive();
  side.gate->open();
  const auto& memory = transfers()[0]->memory;
  const std::byte* const arrived = memory->at(1, 0);
  CHECK(std::all_of(arrived, arrived + kFew * 4, [](std::byte each) { return each == std::byte{0}; }));
  side.valid(0);
  CHECK(memory.use_count() == 1);  // the test's own
}

inline void a_part_counts_as_moving_until_it_is_converted() {
  ConvertedPull side(kMany, transport::Integrity::none, 2);
  side.arrive();
  side.turn();
  CHECK(transfers().size() == 1);
  side.gate->open();
  side.turn();
  CHECK(transfers().size() == 2);
}

inline void a_node_can_end_while_something_is_converted() {
  ConvertedPull side(kMany);
  side.arrive();
  side.book.close_all({Code::closed, "scripted"});
  side.gate->open();
  side.services.copy_threads.reset();
  side.book.drop_transfers();
  side.book.release_all();
  CHECK(side.handle->released());
  CHECK(transfers()[0]->memory.use_count() == 1);
}

inline void without_addresses_for_scratch_memory_a_pull_fails() {
  ConvertedPull side(kFew);
  const plan::Conversion& small = *side.remote.peer->conversion;
  Remote other{handoff::PeerRole::source, {transport::Lane::mapped}};
  other.peer->layout_template = side.remote.peer->layout_template;
  other.peer->conversion = std::make_shared<const plan::Conversion>(
      std::shared_ptr<const plan::Template>(side.remote.peer->conversion, &small.geometry()),
      std::vector{small.pair(0)}, std::uint64_t{1} << 60U);
  TargetSide target(books_table);
  target.pull({other.peer});
  target.grant(0);
  CHECK(target.handle->result()->failure->code == Code::out_of_memory);
  CHECK(target.handle->released());
  side.gate->open();
}

inline void nothing_is_confirmed_before_all_of_it_is_converted() {
  ConvertedPull side(kMany);
  side.turn();
  CHECK(side.handle->state() == handoff::State::moving);
  side.arrive();
  side.turn();
  CHECK(side.handle->state() == handoff::State::converting);
  CHECK(side.is_untouched());
  CHECK(side.remote.count(handoff::Kind::confirm) == 0);
  side.gate->open();
  side.turn();
  CHECK(side.remote.count(handoff::Kind::confirm) == 1);
  CHECK(side.first_of(3) == kOneAndAHalf && side.first_of(5) == kOneAndAHalf);
}

inline void a_conversion_that_is_called_off_writes_nothing() {
  for (const bool lost : {true, false}) {
    ConvertedPull side(kMany);
    side.arrive();
    if (lost) {
      side.remote.lose();
      side.book.on_peer_lost(side.remote.peer);
    } else {
      side.book.cancel(side.parts[0].attempt, {Code::cancelled, "scripted"});
    }
    CHECK(side.handle->released());
    CHECK(side.handle->result()->failed.size() == 1);
    side.gate->open();
    CHECK(side.is_untouched());
  }
}

inline void what_is_summed_is_what_came_and_all_of_it_is_converted() {
  for (const std::size_t wrong : {2U, 1U}) {  // no cell, and the second
    ConvertedPull side(kFew, transport::Integrity::crc32c);
    side.arrive();
    CHECK(side.handle->state() == handoff::State::checking);
    CHECK(side.is_untouched());
    const std::vector<float> block(kFew, 1.5F);
    const auto piece = std::as_bytes(std::span(block));
    const auto sum = static_cast<std::uint32_t>(transport::sum_of({&piece, 1}, transport::Integrity::crc32c));
    std::array<std::uint32_t, 3> sums{sum, sum, 0};
    sums[wrong] ^= 1U;
    side.book.on_sums(side.remote.peer, side.parts[0].attempt,
                      {.first_byte = 0, .bytes = std::as_bytes(std::span(sums).first<2>())});
    CHECK(side.first_of(3) == kOneAndAHalf && side.first_of(5) == kOneAndAHalf);
    CHECK(side.remote.count(handoff::Kind::confirm) == (wrong == 2 ? 1 : 0));
    if (wrong == 1) {
      CHECK(side.handle->result()->failure->code == Code::data_corrupted);
      CHECK(side.handle->result()->failed.size() == 1);
      CHECK(side.handle->result()->valid_prefix_tokens == 1);
    }
    side.gate->open();
  }
}

inline const Tests kConvertedHandoffs{
    {"a_few_elements_are_converted_at_once_and_only_where_they_belong",
     a_few_elements_are_converted_at_once_and_only_where_they_belong},
    {"scratch_memory_is_given_back_once_it_is_converted", scratch_memory_is_given_back_once_it_is_converted},
    {"a_part_counts_as_moving_until_it_is_converted", a_part_counts_as_moving_until_it_is_converted},
    {"a_node_can_end_while_something_is_converted", a_node_can_end_while_something_is_converted},
    {"without_addresses_for_scratch_memory_a_pull_fails", without_addresses_for_scratch_memory_a_pull_fails},
    {"nothing_is_confirmed_before_all_of_it_is_converted", nothing_is_confirmed_before_all_of_it_is_converted},
    {"a_conversion_that_is_called_off_writes_nothing", a_conversion_that_is_called_off_writes_nothing},
    {"what_is_summed_is_what_came_and_all_of_it_is_converted", what_is_summed_is_what_came_and_all_of_it_is_converted},
};

}  // namespace kvlink::test
