// Stage 2. From two block tables to the pairs of token ranges that lie in one block on each side.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvlink/plan/plan.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::plan {

/// The block tables of one group for one request: entry `i` holds the tokens from `i * block_tokens` on. -1 is a hole.
struct GroupTables {
  std::span<const std::int32_t> source;
  std::span<const std::int32_t> target;
};

/// Pairs of the tokens [first_token, end_token) that the target wants. Block sizes may differ. Entries outside of the
/// range are not looked at, and a hole of the target is not wanted.
///
/// Throws Error(not_offered) for a hole of the source that the target wants, and Error(invalid_argument) for a table
/// that is too short, an entry below -1, and a target block that appears twice.
[[nodiscard]] std::vector<BlockPair> pair_blocks(std::span<const std::int32_t> source_table,
                                                 std::uint32_t source_block_tokens,
                                                 std::span<const std::int32_t> target_table,
                                                 std::uint32_t target_block_tokens, std::uint64_t first_token,
                                                 std::uint64_t end_token);

/// Pairs of the slots that the target's table names, entry by entry. The tables alone decide: tokens do not count, and
/// the sequence token of each is 0, since no token is right without its request's state. Throws like `pair_blocks`.
[[nodiscard]] std::vector<BlockPair> pair_slots(std::span<const std::int32_t> source_table,
                                                std::span<const std::int32_t> target_table);

/// The same for every group of a template, in its order: `tables[i]` belongs to `geometry.groups()[i]`. A group with
/// a sliding window moves only its window, one of slots moves whatever the range of tokens, and one of which nothing
/// comes from this source has no pairs, whatever its tables.
///
/// Also throws Error(invalid_argument) if two groups of one block pool would write the same block.
[[nodiscard]] std::vector<std::vector<BlockPair>> pair_groups(const Template& geometry,
                                                              std::span<const GroupTables> tables,
                                                              std::uint64_t first_token, std::uint64_t end_token);

/// The tokens [first_token, end_token) of a request that wants [wanted_from, num_tokens).
struct TokenSpan {
  std::uint64_t wanted_from{};
  std::uint64_t num_tokens{};
  std::uint64_t first_token{};
  std::uint64_t end_token{};
};

/// That part of what `pair_groups` pairs for the whole request. Slots are paired with the last token. Throws like it.
[[nodiscard]] std::vector<std::vector<BlockPair>> pair_span(const Template& geometry,
                                                            std::span<const GroupTables> tables, const TokenSpan& span);

/// What `pair_groups` would pair if the source had every token, without blocks of the source (-1): what a target wants
/// of a source that has not said where it has it. Throws like it.
[[nodiscard]] std::vector<std::vector<BlockPair>> wanted_of_groups(
    const Template& geometry, std::span<const std::span<const std::int32_t>> target_tables, std::uint64_t first_token,
    std::uint64_t end_token);

}  // namespace kvlink::plan
