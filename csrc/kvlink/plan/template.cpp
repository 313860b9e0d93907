#include "kvlink/plan/template.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "kvlink/error.hpp"

namespace kvlink::plan {
namespace {

constexpr std::array<std::string_view, component_count> component_names{"k",     "v",       "latent", "state",
                                                                        "scale", "k_scale", "v_scale"};

/// One op of one block. Keeps every count of a StridedCopy inside 32 bits; real ones are below 16 MiB.
constexpr std::uint64_t max_cell_bytes = std::uint64_t{1} << 30;
constexpr std::uint32_t max_block_index = static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max());

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::invalid_argument, "compile a template: " + what);
}

std::uint64_t multiply(std::uint64_t left, std::uint64_t right, const std::string& what) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) refuse(what + " overflows 64 bits");
  return product;
}

std::uint64_t add(std::uint64_t left, std::uint64_t right, const std::string& what) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(left, right, &sum)) refuse(what + " overflows 64 bits");
  return sum;
}

/// One past the last byte that any block of this side can touch.
std::uint64_t end_offset(const Op& op, const Side& side, std::uint32_t num_blocks, std::uint32_t block_tokens,
                         const std::string& what) {
  auto end = add(side.offset, op.element_bytes, what);
  end = add(end, multiply(side.block_stride, num_blocks - 1, what), what);
  end = add(end, multiply(side.token_stride, block_tokens - 1, what), what);
  end = add(end, multiply(side.head_stride, op.heads - 1, what), what);
  return add(end, multiply(side.dim_stride, op.dims - 1, what), what);
}

void check_side(const Op& op, const Side& side, std::uint32_t num_blocks, std::uint32_t block_tokens,
                std::span<const std::uint64_t> region_bytes, const std::string& what) {
  if (side.region >= region_bytes.size()) {
    refuse(what + " is in region " + std::to_string(side.region) + " of " + std::to_string(region_bytes.size()));
  }
  const auto end = end_offset(op, side, num_blocks, block_tokens, what);
  if (end > region_bytes[side.region]) {
    refuse(what + " ends at byte " + std::to_string(end) + " of a region of " +
           std::to_string(region_bytes[side.region]));
  }
}

void check_group(const GroupGeometry& group) {
  const auto what = "group " + group.name;
  if (group.source_block_tokens == 0 || group.target_block_tokens == 0) refuse(what + " has blocks of 0 tokens");
  if (group.source_num_blocks == 0 || group.target_num_blocks == 0) refuse(what + " has no blocks");
  if (group.source_num_blocks > max_block_index || group.target_num_blocks > max_block_index) {
    refuse(what + " has more blocks than a table entry can name");
  }
  if (group.slots && (group.source_block_tokens != 1 || group.target_block_tokens != 1 || group.window != 0)) {
    refuse(what + " has slots of state, which have neither tokens nor a window");
  }
}

/// Block ids of one block pool mean the same blocks in all of its groups.
void check_pool(const GroupGeometry& group, std::span<const GroupGeometry> groups) {
  if (group.target_block_pool == GroupGeometry::own_blocks) return;
  if (group.target_block_pool >= groups.size())
    refuse("group " + group.name + " is in a block pool that does not exist");
  if (groups[group.target_block_pool].target_num_blocks != group.target_num_blocks) {
    refuse("group " + group.name + " shares a block pool with " + groups[group.target_block_pool].name +
           " and has another number of blocks");
  }
}

void check_op(const Op& op, std::span<const GroupGeometry> groups, std::size_t layer_count, const std::string& what) {
  if (op.group >= groups.size()) refuse(what + " is in group " + std::to_string(op.group));
  if (op.layer >= layer_count) refuse(what + " is of layer " + std::to_string(op.layer));
  if (op.component >= component_count) refuse(what + " is of component " + std::to_string(op.component));
  if (op.heads == 0 || op.dims == 0 || op.element_bytes == 0) refuse(what + " has no bytes");
  if (op.first_head > std::numeric_limits<std::uint32_t>::max() - op.heads) {
    refuse(what + " is of heads that overflow 32 bits");
  }
  const auto& group = groups[op.group];
  const auto tokens = std::max(group.source_block_tokens, group.target_block_tokens);
  const auto elements = multiply(multiply(op.heads, op.dims, what), op.element_bytes, what);
  if (multiply(elements, tokens, what) > max_cell_bytes) refuse(what + " has more than 1 GiB in a block");
}

std::uint64_t stride_of(const Side& side, CellAxis axis) noexcept {
  switch (axis) {
    case CellAxis::token:
      return side.token_stride;
    case CellAxis::head:
      return side.head_stride;
    case CellAxis::dim:
      return side.dim_stride;
  }
  return 0;
}

/// Innermost first, by the target's strides: it is written front to back, and axes that continue each other on both
/// sides end up next to each other.
std::array<CellAxis, 3> order_of(const Op& op) {
  std::array<CellAxis, 3> order{CellAxis::dim, CellAxis::head, CellAxis::token};
  std::ranges::stable_sort(order, [&](CellAxis left, CellAxis right) {
    const auto key = [&](CellAxis axis) { return std::pair{stride_of(op.target, axis), stride_of(op.source, axis)}; };
    return key(left) < key(right);
  });
  return order;
}

}  // namespace

std::string_view component_name(std::uint32_t component) {
  if (component >= component_count) {
    throw Error(Code::invalid_argument, "name a component: there is no component " + std::to_string(component));
  }
  return component_names[component];
}

Template::Template(std::vector<Op> ops, std::vector<GroupGeometry> groups, std::vector<std::string> layers,
                   std::vector<std::uint64_t> source_region_bytes, std::vector<std::uint64_t> target_region_bytes)
    : ops_(std::move(ops)),
      groups_(std::move(groups)),
      layers_(std::move(layers)),
      source_region_bytes_(std::move(source_region_bytes)),
      target_region_bytes_(std::move(target_region_bytes)),
      token_bytes_(groups_.size(), 0) {
  for (const auto& group : groups_) {
    check_group(group);
    check_pool(group, groups_);
  }
  loop_orders_.reserve(ops_.size());
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const auto& op = ops_[i];
    const auto what = "op " + std::to_string(i);
    check_op(op, groups_, layers_.size(), what);
    const auto& group = groups_[op.group];
    check_side(op, op.source, group.source_num_blocks, group.source_block_tokens, source_region_bytes_,
               "the source of " + what);
    check_side(op, op.target, group.target_num_blocks, group.target_block_tokens, target_region_bytes_,
               "the target of " + what);
    loop_orders_.push_back(order_of(op));
    token_bytes_[op.group] += std::uint64_t{op.heads} * op.dims * op.element_bytes;
  }
}

Template Template::restricted_to(const std::vector<bool>& layers) const {
  Template part = *this;
  part.ops_.clear();
  part.loop_orders_.clear();
  std::ranges::fill(part.token_bytes_, 0);
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (!layers[op.layer]) continue;
    part.ops_.push_back(op);
    part.loop_orders_.push_back(loop_orders_[i]);
    part.token_bytes_[op.group] += std::uint64_t{op.heads} * op.dims * op.element_bytes;
  }
  return part;
}

}  // namespace kvlink::plan
