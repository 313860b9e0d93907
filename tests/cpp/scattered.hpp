// Plans over scattered blocks, for tests of what copies by them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::test {

/// Blocks of `block_bytes` in one region a side, in an order of its own on each side.
struct Scattered {
  std::uint64_t block_bytes{};
  std::uint32_t blocks{};  // of the pool; the plan moves `moved` of them
  std::uint32_t moved{};

  [[nodiscard]] std::uint64_t pool_bytes() const { return block_bytes * blocks; }

  [[nodiscard]] std::shared_ptr<const plan::Plan> plan(std::uint64_t seed) const {
    plan::Op op;
    op.dims = static_cast<std::uint32_t>(block_bytes);
    op.source = {.region = 0,
                 .offset = 0,
                 .block_stride = block_bytes,
                 .token_stride = block_bytes,
                 .head_stride = block_bytes,
                 .dim_stride = 1};
    op.target = op.source;
    plan::GroupGeometry group;
    group.name = "full";
    group.source_block_tokens = group.target_block_tokens = 1;
    group.source_num_blocks = group.target_num_blocks = blocks;
    const std::vector<std::uint64_t> sizes{pool_bytes()};
    auto geometry = std::make_shared<const plan::Template>(std::vector{op}, std::vector{group},
                                                           std::vector<std::string>{"layer"}, sizes, sizes);
    std::vector<plan::BlockPair> pairs;
    const auto sources = permutation(seed);
    const auto targets = permutation(seed + 1);
    for (std::uint32_t i = 0; i < moved; ++i) {
      pairs.push_back({.source_block = sources[i], .target_block = targets[i], .tokens = 1, .sequence_token = i});
    }
    return std::make_shared<const plan::Plan>(geometry, std::vector<std::vector<plan::BlockPair>>{pairs});
  }

 private:
  [[nodiscard]] std::vector<std::int32_t> permutation(std::uint64_t seed) const {
    std::vector<std::int32_t> order(blocks);
    for (std::uint32_t i = 0; i < blocks; ++i) order[i] = static_cast<std::int32_t>(i);
    std::mt19937_64 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    return order;
  }
};

inline void fill(std::byte* at, std::uint64_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::uint64_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(random() >> 56);
}

/// What `plan` makes of `target` when it is carried out byte by byte.
inline void copy_by_the_book(const plan::Plan& plan, const std::byte* source, std::byte* target) {
  plan.visit(0, plan.total_bytes(), [&](const plan::StridedCopy& copy) {
    for (std::uint64_t outer = 0; outer < copy.outer; ++outer) {
      for (std::uint64_t inner = 0; inner < copy.inner; ++inner) {
        std::memcpy(target + copy.target_offset + outer * copy.target_outer_stride + inner * copy.target_inner_stride,
                    source + copy.source_offset + outer * copy.source_outer_stride + inner * copy.source_inner_stride,
                    copy.run_bytes);
      }
    }
  });
}

}  // namespace kvlink::test
