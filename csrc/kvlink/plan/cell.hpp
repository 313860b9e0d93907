// Stage 2. The bytes of one op in one block pair, as nested loops of contiguous runs.
#pragma once

#include <array>
#include <cstdint>

#include "kvlink/plan/plan.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::plan {

/// Which sides of the copies are memory. The other side is the packed byte stream.
enum class Sides : std::uint8_t { both, source, target };

/// One loop of a cell.
struct CellLoop {
  std::uint32_t count{1};
  std::uint64_t source_stride{};
  std::uint64_t target_stride{};
};

/// A cell without its place: `depth` loops, innermost first, around one contiguous run.
struct CellShape {
  std::uint64_t run_bytes{};
  std::uint64_t bytes{};
  std::uint32_t depth{};
  std::array<CellLoop, 3> loops{};

  /// Bytes of one turn of loop `level`.
  [[nodiscard]] std::uint64_t turn_bytes(std::uint32_t level) const noexcept {
    auto size = run_bytes;
    for (std::uint32_t i = 0; i < level; ++i) size *= loops[i].count;
    return size;
  }
};

/// The shape of `tokens` tokens of an op: axes that continue each other on both sides are fused.
[[nodiscard]] CellShape cell_shape(const Op& op, const std::array<CellAxis, 3>& loop_order, std::uint32_t tokens,
                                   Sides sides) noexcept;

/// `turns` turns of loop `level` of a cell that starts at the offsets of `place`, which names the regions too.
/// Level 0 is a loop over runs; at most two loops fit.
[[nodiscard]] inline StridedCopy grid_of(const CellShape& shape, std::uint32_t level, std::uint32_t turns,
                                         StridedCopy place) noexcept {
  place.run_bytes = shape.run_bytes;
  const auto& last = shape.loops[level];
  if (level == 0) {
    place.inner = turns;
    place.source_inner_stride = last.source_stride;
    place.target_inner_stride = last.target_stride;
  } else {
    place.inner = shape.loops[0].count;
    place.source_inner_stride = shape.loops[0].source_stride;
    place.target_inner_stride = shape.loops[0].target_stride;
    place.outer = turns;
    place.source_outer_stride = last.source_stride;
    place.target_outer_stride = last.target_stride;
  }
  return place;
}

/// The whole cell as one copy, where its loops fit one.
[[nodiscard]] inline StridedCopy whole_cell(const CellShape& shape, const StridedCopy& place) noexcept {
  if (shape.depth != 0)
    return grid_of(shape, shape.depth > 1 ? 1 : 0, shape.loops[shape.depth > 1 ? 1 : 0].count, place);
  auto run = place;
  run.run_bytes = shape.run_bytes;
  return run;
}

/// Emits bytes [begin, end) of the loops below `depth`, in stream order, cutting runs only at the two ends.
template <class Emit>
void cut_cell(const CellShape& shape, std::uint32_t depth, StridedCopy place, std::uint64_t begin, std::uint64_t end,
              Emit& emit) {
  if (depth == 0) {
    place.source_offset += begin;
    place.target_offset += begin;
    place.run_bytes = end - begin;
    emit(place);
    return;
  }
  const auto level = depth - 1;
  const auto size = shape.turn_bytes(level);
  const auto at = [&](std::uint64_t turn) {
    auto moved = place;
    moved.source_offset += turn * shape.loops[level].source_stride;
    moved.target_offset += turn * shape.loops[level].target_stride;
    return moved;
  };
  auto turn = begin / size;
  const auto last = end / size;
  if (begin % size != 0) {
    const auto start = turn * size;
    const auto stop = end < start + size ? end : start + size;
    cut_cell(shape, level, at(turn), begin - start, stop - start, emit);
    ++turn;
  }
  if (turn < last && level <= 1) {
    emit(grid_of(shape, level, static_cast<std::uint32_t>(last - turn), at(turn)));
    turn = last;
  }
  for (; turn < last; ++turn) cut_cell(shape, level, at(turn), 0, size, emit);
  if (turn == last && end > last * size) cut_cell(shape, level, at(last), 0, end - last * size, emit);
}

}  // namespace kvlink::plan
