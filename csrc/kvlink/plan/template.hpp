// Stage 2. The copies inside one block pair, compiled once per peer pair and shared by all of its requests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvlink/plan/plan.hpp"

namespace kvlink::plan {

/// How one group of layers pages its tokens on both sides. A group has one block table a side. One that the source
/// does not have stands here with the source index 0 and no op, so that the target's groups keep their positions.
struct GroupGeometry {
  std::string name;
  std::uint32_t source_index{};  // where the group stands in the source's own list of groups
  std::uint32_t target_index{};
  std::uint32_t source_block_tokens{};
  std::uint32_t target_block_tokens{};
  std::uint32_t source_num_blocks{};
  std::uint32_t target_num_blocks{};
  std::uint32_t window{};  // tokens that a sliding window attends to; 0: all of them
  bool slots{};            // a block is a slot of state that a request has as a whole: no tokens, always wanted

  /// Groups of the target with the same number draw their blocks from one block pool and may lie in the same bytes: the
  /// position of the first of them. `own_blocks`: the blocks are the group's own.
  std::uint32_t target_block_pool{own_blocks};
  static constexpr std::uint32_t own_blocks = std::numeric_limits<std::uint32_t>::max();

  /// The first token of [first_token, end_token) that the target can ever read.
  [[nodiscard]] std::uint64_t first_wanted_token(std::uint64_t first_token, std::uint64_t end_token) const noexcept {
    if (window == 0 || end_token <= window) return first_token;
    return first_token > end_token - window ? first_token : end_token - window;
  }
};

/// "k", "v", "latent", "state", "scale", "k_scale" or "v_scale"; throws Error(invalid_argument) for another index.
[[nodiscard]] std::string_view component_name(std::uint32_t component);
inline constexpr std::uint32_t component_count = 7;

/// The three axes inside a block.
enum class CellAxis : std::uint8_t { token, head, dim };

/// The copies of one block pair, for every (group, layer, component, head range) that the target takes from the source.
/// There may be none: a replica that nobody needs, whose handoffs have no bytes.
///
/// Immutable. Both peers compile the same template from the same two layouts, so the order of its ops and the order
/// of the bytes inside each op are the same on both sides.
class Template {
 public:
  /// Checks everything, down to the last byte of the last block lying inside its region: what comes from a peer is
  /// hostile. Throws Error(invalid_argument).
  Template(std::vector<Op> ops, std::vector<GroupGeometry> groups, std::vector<std::string> layers,
           std::vector<std::uint64_t> source_region_bytes, std::vector<std::uint64_t> target_region_bytes);

  [[nodiscard]] std::span<const Op> ops() const noexcept { return ops_; }
  [[nodiscard]] std::span<const GroupGeometry> groups() const noexcept { return groups_; }
  [[nodiscard]] std::span<const std::string> layers() const noexcept { return layers_; }
  [[nodiscard]] std::span<const std::uint64_t> source_region_bytes() const noexcept { return source_region_bytes_; }
  [[nodiscard]] std::span<const std::uint64_t> target_region_bytes() const noexcept { return target_region_bytes_; }

  /// Axes of an op, innermost first: the order of its bytes in the stream.
  [[nodiscard]] const std::array<CellAxis, 3>& loop_order(std::size_t op) const noexcept { return loop_orders_[op]; }

  /// The same without the ops of other layers than those that are true. Groups and layers keep their positions.
  [[nodiscard]] Template restricted_to(const std::vector<bool>& layers) const;

  /// Bytes that all ops of a group move for one token, or for one slot. 0: nothing of this group comes from here.
  [[nodiscard]] std::uint64_t token_bytes(std::size_t group) const noexcept { return token_bytes_[group]; }

 private:
  std::vector<Op> ops_;
  std::vector<GroupGeometry> groups_;
  std::vector<std::string> layers_;
  std::vector<std::uint64_t> source_region_bytes_;
  std::vector<std::uint64_t> target_region_bytes_;
  std::vector<std::array<CellAxis, 3>> loop_orders_;
  std::vector<std::uint64_t> token_bytes_;
};

}  // namespace kvlink::plan
