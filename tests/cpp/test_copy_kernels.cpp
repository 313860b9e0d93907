// Every run length, alignment and way of storing copies the runs, and not one byte beside them.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "kvlink/transport/copy_kernels.hpp"
#include "scattered.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

/// Copies `grid` at the given shifts from a cache line and compares the whole target with a copy byte by byte.
void check_grid(const plan::StridedCopy& grid, std::size_t source_shift, std::size_t target_shift, Stores stores) {
  constexpr std::size_t kMargin = 128;
  const auto extent = [&](std::uint64_t inner, std::uint64_t outer) {
    return kMargin * 2 + 64 + grid.run_bytes + inner * (grid.inner - 1) + outer * (grid.outer - 1);
  };
  const std::size_t source_bytes = extent(grid.source_inner_stride, grid.source_outer_stride);
  const std::size_t target_bytes = extent(grid.target_inner_stride, grid.target_outer_stride);
  const auto lines = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
  auto* source = static_cast<std::byte*>(std::aligned_alloc(64, lines(source_bytes)));
  auto* target = static_cast<std::byte*>(std::aligned_alloc(64, lines(target_bytes)));
  test::fill(source, source_bytes, grid.run_bytes + source_shift);
  std::memset(target, 0x5a, target_bytes);
  std::vector<std::byte> expected(target, target + target_bytes);
  for (std::uint64_t outer = 0; outer < grid.outer; ++outer) {
    for (std::uint64_t inner = 0; inner < grid.inner; ++inner) {
      const auto from = outer * grid.source_outer_stride + inner * grid.source_inner_stride;
      const auto to = outer * grid.target_outer_stride + inner * grid.target_inner_stride;
      for (std::uint64_t i = 0; i < grid.run_bytes; ++i) {
        expected[kMargin + target_shift + to + i] = source[kMargin + source_shift + from + i];
      }
    }
  }
  copy_grid(source + kMargin + source_shift, target + kMargin + target_shift, grid, stores);
  finish_copies(0);
  CHECK(std::memcmp(target, expected.data(), target_bytes) == 0);
  std::free(source);
  std::free(target);
}

void every_length_at_odd_places() {
  for (std::uint64_t run = 1; run <= 700; ++run) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{32}, std::size_t{63}}) {
      const plan::StridedCopy grid{.run_bytes = run,
                                   .inner = 3,
                                   .outer = 2,
                                   .source_inner_stride = run + 5,
                                   .target_inner_stride = run + 1,
                                   .source_outer_stride = 4 * run + 40,
                                   .target_outer_stride = 4 * run + 17};
      check_grid(grid, 7, shift, Stores::cached);
      check_grid(grid, shift, 64 - shift, Stores::streaming);
    }
  }
}

void head_slices_of_whole_lines() {
  for (const std::uint64_t run : {64, 128, 192, 256, 512, 1024, 2048}) {
    const plan::StridedCopy grid{.run_bytes = run,
                                 .inner = 16,
                                 .outer = 4,
                                 .source_inner_stride = run * 8,
                                 .target_inner_stride = run * 2,
                                 .source_outer_stride = run * 128,
                                 .target_outer_stride = run * 64};
    check_grid(grid, 0, 0, Stores::streaming);
    check_grid(grid, 0, 16, Stores::streaming);
    check_grid(grid, 0, 0, Stores::cached);
  }
}

void random_grids() {
  std::mt19937_64 random(20);
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  for (int i = 0; i < 2000; ++i) {
    plan::StridedCopy grid{.run_bytes = 1 + below(5000),
                           .inner = static_cast<std::uint32_t>(1 + below(6)),
                           .outer = static_cast<std::uint32_t>(1 + below(4))};
    grid.source_inner_stride = grid.run_bytes + below(200);
    grid.target_inner_stride = grid.run_bytes + below(200);
    grid.source_outer_stride = grid.source_inner_stride * grid.inner + below(300);
    grid.target_outer_stride = grid.target_inner_stride * grid.inner + below(300);
    check_grid(grid, below(64), below(64), below(2) == 0 ? Stores::cached : Stores::streaming);
  }
}

void grids_in_a_sequence() {
  std::mt19937_64 random(21);
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  constexpr std::size_t kBytes = 1 << 20;
  std::vector<std::byte> source(kBytes);
  test::fill(source.data(), kBytes, 22);
  for (int i = 0; i < 500; ++i) {
    const auto stores = below(2) == 0 ? Stores::cached : Stores::streaming;
    const std::uint64_t longest = below(2) == 0 ? 9000 : 600;
    std::vector<std::byte> target(kBytes, std::byte{0x5a});
    auto expected = target;
    CopySequence sequence(stores);
    std::uint64_t at = below(100);
    for (std::uint64_t left = below(30); left > 0; --left) {
      plan::StridedCopy grid{.run_bytes = below(longest),
                             .inner = static_cast<std::uint32_t>(1 + below(20)),
                             .outer = static_cast<std::uint32_t>(1 + below(2))};
      grid.source_inner_stride = below(2 * longest);
      grid.source_outer_stride = below(4 * longest);
      grid.target_inner_stride = grid.run_bytes + below(64);
      grid.target_outer_stride = grid.inner * grid.target_inner_stride + below(64);
      const std::uint64_t span = grid.outer * grid.target_outer_stride;
      if (at + span > kBytes) break;
      const std::byte* from = source.data() + below(kBytes / 2);
      copy_grid(from, expected.data() + at, grid, Stores::cached);
      sequence.add(from, target.data() + at, grid);
      at += span + below(70);
    }
    sequence.finish(0);
    CHECK(target == expected);
  }
}

void lengths_around_every_limit_in_a_sequence() {
  constexpr std::size_t kBytes = 1 << 19;
  std::vector<std::byte> source(kBytes);
  test::fill(source.data(), kBytes, 23);
  for (const auto stores : {Stores::cached, Stores::streaming}) {
    for (std::uint64_t shift = 0; shift < 64; shift += 9) {
      std::vector<std::byte> target(kBytes, std::byte{0x5a});
      auto expected = target;
      CopySequence sequence(stores);
      std::uint64_t at = shift;
      for (const std::uint64_t limit : {256, 512, 4096, 4608, 32768, 65536}) {
        for (const std::uint64_t bytes : {limit - 1, limit, limit + 1}) {
          std::memcpy(expected.data() + at, source.data() + shift, bytes);
          sequence.add(source.data() + shift, target.data() + at, {.run_bytes = bytes});
          at += bytes + 3;
        }
      }
      sequence.finish(0);
      CHECK(target == expected);
    }
  }
}

void empty_runs_touch_nothing() {
  std::byte byte{7};
  copy_grid(nullptr, &byte, {.run_bytes = 0}, Stores::streaming);
  CopySequence sequence(Stores::streaming);
  sequence.finish(0);
  sequence.add(nullptr, &byte, {.run_bytes = 0});
  sequence.finish(0);
  CHECK(byte == std::byte{7});
}

void bytes_are_counted_once() {
  const auto before = copied_bytes();
  finish_copies(100);
  count_copied(23);
  CHECK(copied_bytes() - before == 123);
}

}  // namespace

int main() {
  return test::run({{"every length at odd places", every_length_at_odd_places},
                    {"head slices of whole lines", head_slices_of_whole_lines},
                    {"random grids", random_grids},
                    {"grids in a sequence", grids_in_a_sequence},
                    {"lengths around every limit in a sequence", lengths_around_every_limit_in_a_sequence},
                    {"empty runs touch nothing", empty_runs_touch_nothing},
                    {"bytes are counted once", bytes_are_counted_once}});
}
