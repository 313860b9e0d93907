// Stage 2. What one request copies: a template compiled once per peer pair, times the block pairs of the request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvlink::plan {

/// Where one (group, layer, component, head range) lies on one side. The byte of
/// (block, token, head, dim) is `offset + block*block_stride + token*token_stride + head*head_stride + dim*dim_stride`
/// counted from the start of region `region`; `head` counts from the first head of the op.
struct Side {
  std::uint32_t region{};
  std::uint64_t offset{};
  std::uint64_t block_stride{};
  std::uint64_t token_stride{};
  std::uint64_t head_stride{};
  std::uint64_t dim_stride{};
};

/// One piece of the template: the same elements on both sides.
struct Op {
  std::uint32_t group{};
  std::uint32_t layer{};       // index into the template's list of global layer names
  std::uint32_t component{};   // index into the names of template.hpp
  std::uint32_t first_head{};  // in the model; 0 where elements have no heads
  std::uint32_t heads{1};
  std::uint32_t dims{1};
  std::uint32_t element_bytes{1};
  Side source;
  Side target;
};

/// Tokens that lie in one block on each side. `-1` on a side that this process does not address
/// (the source of a staged stream has no target).
struct BlockPair {
  std::int32_t source_block{};
  std::int32_t target_block{};
  std::uint32_t source_token{};  // first token inside the source block
  std::uint32_t target_token{};  // first token inside the target block
  std::uint32_t tokens{};
  std::uint64_t sequence_token{};  // the same token counted from the start of the request
};

/// A regular grid of contiguous runs: `outer x inner` runs of `run_bytes`, both strides per side.
struct StridedCopy {
  std::uint32_t source_region{};
  std::uint32_t target_region{};
  std::uint64_t source_offset{};
  std::uint64_t target_offset{};
  std::uint64_t run_bytes{};
  std::uint32_t inner{1};
  std::uint32_t outer{1};
  std::uint64_t source_inner_stride{};
  std::uint64_t target_inner_stride{};
  std::uint64_t source_outer_stride{};
  std::uint64_t target_outer_stride{};
  [[nodiscard]] std::uint64_t bytes() const noexcept { return run_bytes * inner * outer; }
};

}  // namespace kvlink::plan
