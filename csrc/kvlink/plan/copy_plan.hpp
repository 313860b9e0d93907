// Stage 2. One request: a template times its block pairs, seen as one stream of bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvlink/plan/cell.hpp"
#include "kvlink/plan/plan.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::plan {

/// Half-open range of the stream.
struct ByteRange {
  std::uint64_t begin{};
  std::uint64_t end{};
};

/// What a part of the stream means. Indices are the template's.
struct FailedRange {
  std::uint32_t group{};
  std::uint32_t layer{};
  std::uint32_t component{};
  std::uint32_t first_head{};  // in the model; what has no heads counts as head 0
  std::uint32_t end_head{};
  std::uint64_t first_token{};  // counted from the start of the request
  std::uint64_t end_token{};
  bool operator==(const FailedRange&) const = default;
};

/// The copies of one request. Immutable, so threads share it without a lock.
///
/// The stream has every byte once: op after op in the template's order, inside an op pair after pair, inside a pair
/// in the loop order of the op. So its order depends only on the template and on the token counts of the pairs, and
/// the two sides of a staged lane agree on it without exchanging more than those.
class Plan {
 public:
  /// `pairs_by_group[i]` belongs to group `i` of the template. All pairs address both sides, or all leave the same
  /// side out with block -1. Throws Error(invalid_argument) for a pair outside of its blocks.
  Plan(std::shared_ptr<const Template> geometry, std::vector<std::vector<BlockPair>> pairs_by_group);

  [[nodiscard]] const Template& geometry() const noexcept { return *geometry_; }
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return op_begin_.back(); }
  [[nodiscard]] Sides sides() const noexcept { return sides_; }
  [[nodiscard]] std::span<const BlockPair> pairs(std::size_t group) const noexcept { return pairs_[group]; }

  /// Calls `visit(const StridedCopy&)` for the bytes [begin, end) of the stream, in its order. Cells that continue
  /// each other on both sides come as one copy. Allocates nothing.
  template <class Visit>
  void visit(std::uint64_t begin, std::uint64_t end, Visit&& visit) const {
    walk(sides_, begin, end, visit);
  }

  /// The same from source memory to a packed buffer that holds [begin, end): the target is region 0, and its offsets
  /// count from the start of that buffer. For plans that address the source.
  template <class Visit>
  void visit_source(std::uint64_t begin, std::uint64_t end, Visit&& visit) const {
    walk(Sides::source, begin, end, visit);
  }

  /// The same from a packed buffer that holds [begin, end) to target memory. For plans that address the target.
  template <class Visit>
  void visit_target(std::uint64_t begin, std::uint64_t end, Visit&& visit) const {
    walk(Sides::target, begin, end, visit);
  }

  /// What the bytes [begin, end) hold, in whole pairs: a cell that is cut counts as a whole.
  [[nodiscard]] std::vector<FailedRange> describe(ByteRange range) const;

  /// Tokens from the start of the request that are right although `missing` did not arrive; `num_tokens` if nothing
  /// is missing.
  [[nodiscard]] std::uint64_t valid_prefix_tokens(std::span<const ByteRange> missing, std::uint64_t num_tokens) const;

 private:
  template <class Visit>
  void walk(Sides sides, std::uint64_t begin, std::uint64_t end, Visit& visit) const;
  template <class Merger>
  void walk_op(Sides sides, std::size_t op, ByteRange range, Merger& merger) const;

  /// Where the cells of one row start on one side: by block and token in memory, or one behind the other in a packed
  /// stream. Each pair of these has a loop of its own, which does no more than it needs.
  struct InMemory {
    std::uint64_t offset{};
    std::uint64_t block_stride{};
    std::uint64_t token_stride{};

    explicit InMemory(const Side& side) noexcept
        : offset(side.offset), block_stride(side.block_stride), token_stride(side.token_stride) {}
    [[nodiscard]] std::uint64_t next(std::int32_t block, std::uint32_t token) const noexcept {
      return offset + static_cast<std::uint64_t>(block) * block_stride + token * token_stride;
    }
  };
  struct Packed {
    std::uint64_t offset{};
    std::uint64_t step{};

    [[nodiscard]] std::uint64_t next(std::int32_t, std::uint32_t) noexcept {
      return std::exchange(offset, offset + step);
    }
  };
  /// Places those of `pairs` that have as many tokens as the first, up to one that has not; returns how many they are.
  template <class Merger, class SourceSide, class TargetSide>
  static std::size_t place_row(std::span<const BlockPair> pairs, Merger& merger, SourceSide source, TargetSide target);

  [[nodiscard]] std::size_t op_at(std::uint64_t position) const noexcept;
  /// The pair of `group` that holds its token number `token`, counted over the pairs alone.
  [[nodiscard]] std::size_t pair_at(std::size_t group, std::uint64_t token) const noexcept;

  std::shared_ptr<const Template> geometry_;
  std::vector<std::vector<BlockPair>> pairs_;
  std::vector<std::vector<std::uint64_t>> tokens_before_;  // by group: running sum over its pairs, one entry longer
  std::vector<std::uint64_t> op_begin_;                    // by op: where it starts in the stream, one entry longer
  Sides sides_{Sides::both};
};

/// Joins cells that continue each other on both sides, then passes them on. The inner loop of posting: a cell that
/// continues nothing costs three stores and the visit.
template <class Visit>
class CopyMerger {
 public:
  explicit CopyMerger(Visit& visit) : visit_(&visit) {}

  /// The cells that follow look like `cell` but for their offsets: one run, or a grid of at most two loops.
  void expect(const StridedCopy& cell) {
    const auto run = cell.inner == 1 && cell.outer == 1;
    // A run may go on in another shape, such as a last block that is not full; a grid may not.
    if (!run || !mergeable_run_ || pending_.source_region != cell.source_region ||
        pending_.target_region != cell.target_region) {
      flush();
      pending_ = cell;
    }
    mergeable_run_ = run;
    mergeable_grid_ = !run && cell.outer == 1;
    cell_run_bytes_ = cell.run_bytes;
    cell_inner_ = cell.inner;
    // Bytes from the start of a cell to where the next one has to start, on each side.
    source_step_ = run ? cell.run_bytes : cell.source_inner_stride * cell.inner;
    target_step_ = run ? cell.run_bytes : cell.target_inner_stride * cell.inner;
  }

  void place(std::uint64_t source_offset, std::uint64_t target_offset) {
    const auto continues = source_offset == source_end_ && target_offset == target_end_ && has_pending_;
    source_end_ = source_offset + source_step_;
    target_end_ = target_offset + target_step_;
    if (continues && mergeable_run_) {
      pending_.run_bytes += cell_run_bytes_;
      return;
    }
    if (continues && mergeable_grid_ && pending_.inner <= max_inner - cell_inner_) {
      pending_.inner += cell_inner_;
      return;
    }
    if (has_pending_) (*visit_)(static_cast<const StridedCopy&>(pending_));
    has_pending_ = true;
    pending_.run_bytes = cell_run_bytes_;
    pending_.inner = cell_inner_;
    pending_.source_offset = source_offset;
    pending_.target_offset = target_offset;
  }

  /// A copy on its own.
  void operator()(const StridedCopy& copy) {
    expect(copy);
    place(copy.source_offset, copy.target_offset);
  }

  void flush() {
    if (has_pending_) (*visit_)(static_cast<const StridedCopy&>(pending_));
    has_pending_ = false;
  }

 private:
  static constexpr auto max_inner = std::numeric_limits<std::uint32_t>::max();

  Visit* visit_;
  StridedCopy pending_{};
  bool has_pending_{};
  bool mergeable_run_{};
  bool mergeable_grid_{};
  std::uint32_t cell_inner_{};
  std::uint64_t cell_run_bytes_{};
  std::uint64_t source_step_{};
  std::uint64_t target_step_{};
  std::uint64_t source_end_{};
  std::uint64_t target_end_{};
};

template <class Visit>
void Plan::walk(Sides sides, std::uint64_t begin, std::uint64_t end, Visit& visit) const {
  end = std::min(end, total_bytes());
  if (begin >= end) return;
  CopyMerger<Visit> merger{visit};
  for (auto op = op_at(begin); op + 1 < op_begin_.size() && op_begin_[op] < end; ++op) {
    walk_op(sides, op, {begin, end}, merger);
  }
  merger.flush();
}

template <class Merger>
void Plan::walk_op(Sides sides, std::size_t op_index, ByteRange range, Merger& merger) const {
  const auto& op = geometry_->ops()[op_index];
  const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
  const auto begin = std::max(range.begin, op_begin_[op_index]);
  const auto end = std::min(range.end, op_begin_[op_index + 1]);
  if (begin >= end) return;
  const std::span<const BlockPair> pairs{pairs_[op.group]};
  auto index = pair_at(op.group, (begin - op_begin_[op_index]) / token_bytes);
  auto position = op_begin_[op_index] + tokens_before_[op.group][index] * token_bytes;
  while (position < end) {
    const auto tokens = pairs[index].tokens;
    const auto shape = cell_shape(op, geometry_->loop_order(op_index), tokens, sides);
    StridedCopy cell{};
    if (sides != Sides::target) cell.source_region = op.source.region;
    if (sides != Sides::source) cell.target_region = op.target.region;
    // The packed offset of a cell that starts before `begin` wraps, and the cut adds it back: unsigned on purpose.
    Packed packed{.offset = position - range.begin, .step = shape.bytes};
    if (position < begin || shape.bytes > end - position || shape.depth > 2) {
      const auto& pair = pairs[index++];
      cell.source_offset = cell.target_offset = packed.offset;
      if (sides != Sides::target) cell.source_offset = InMemory(op.source).next(pair.source_block, pair.source_token);
      if (sides != Sides::source) cell.target_offset = InMemory(op.target).next(pair.target_block, pair.target_token);
      const auto cut_begin = begin > position ? begin - position : 0;
      cut_cell(shape, shape.depth, cell, cut_begin, std::min(shape.bytes, end - position), merger);
      position += shape.bytes;
      continue;
    }
    // Pairs with the same number of tokens have the same shape; most of a request is one such row.
    const auto row =
        pairs.subspan(index, std::min<std::uint64_t>(pairs.size() - index, (end - position) / shape.bytes));
    merger.expect(whole_cell(shape, cell));
    std::size_t placed = 0;
    switch (sides) {
      case Sides::both:
        placed = place_row(row, merger, InMemory(op.source), InMemory(op.target));
        break;
      case Sides::source:
        placed = place_row(row, merger, InMemory(op.source), packed);
        break;
      case Sides::target:
        placed = place_row(row, merger, packed, InMemory(op.target));
        break;
    }
    index += placed;
    position += placed * shape.bytes;
  }
}

template <class Merger, class SourceSide, class TargetSide>
std::size_t Plan::place_row(std::span<const BlockPair> pairs, Merger& merger, SourceSide source, TargetSide target) {
  auto row = merger;  // A copy that nothing else can see, so that its numbers stay in registers.
  std::size_t placed = 0;
  for (const auto& pair : pairs) {
    if (pair.tokens != pairs.front().tokens) break;
    row.place(source.next(pair.source_block, pair.source_token), target.next(pair.target_block, pair.target_token));
    ++placed;
  }
  merger = row;
  return placed;
}

}  // namespace kvlink::plan
