// A template from two layouts, one of them of a hostile peer, and plans over block tables that it sent: what is not
// refused addresses bytes inside its regions only, and every cut of the stream walks the same bytes.
#include <memory>
#include <utility>
#include <vector>

#include "fuzz.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/block_pairs.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/plan/sum_cells.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::plan;

/// What is walked byte by byte of one plan.
constexpr std::uint64_t kMostBytes = 192;
using Walk = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // by byte: where it comes from, where it goes
using wide = unsigned __int128;

Side side_of(fuzz::Input& input, const Op& op, std::uint32_t regions) {
  Side side;
  side.region = input.edgy32(regions - 1);
  side.offset = input.edgy(32);
  if (input.flag()) {  // packed, as honest layouts are
    side.dim_stride = op.element_bytes;
    side.head_stride = side.dim_stride * op.dims;
    side.token_stride = side.head_stride * op.heads;
    side.block_stride = side.token_stride * 4;
    return side;
  }
  side.dim_stride = input.edgy(16);
  side.head_stride = input.edgy(64);
  side.token_stride = input.edgy(64);
  side.block_stride = input.edgy(200);
  return side;
}

struct Draft {
  std::vector<GroupGeometry> groups;
  std::vector<Op> ops;
  std::vector<std::uint64_t> source_bytes;
  std::vector<std::uint64_t> target_bytes;
};

Draft draft_of(fuzz::Input& input) {
  Draft draft;
  draft.groups.resize(1 + input.below(3));
  for (auto& group : draft.groups) {
    group.name = "group";
    group.source_block_tokens = 1 + input.edgy32(4);
    group.target_block_tokens = 1 + input.edgy32(4);
    group.source_num_blocks = 1 + input.edgy32(7);
    group.target_num_blocks = 1 + input.edgy32(7);
    const std::uint8_t kind = input.byte();
    group.window = kind < 128 ? 0 : kind % 8;
    group.slots = kind >= 192 && kind < 224;
    if (group.slots) group.source_block_tokens = group.target_block_tokens = 1;
    if (kind >= 224) group.target_block_pool = kind % 4;
  }
  const auto sizes = [&] {
    std::vector<std::uint64_t> made(1 + input.below(2));
    for (auto& size : made) size = std::uint64_t{256} + input.edgy(231) * 16;
    return made;
  };
  draft.source_bytes = sizes();
  draft.target_bytes = sizes();
  draft.ops.resize(input.below(5));
  for (auto& op : draft.ops) {
    op.group = input.edgy32(static_cast<std::uint32_t>(draft.groups.size()) - 1);
    op.layer = input.edgy32(1);
    op.component = input.edgy32(component_count - 1);
    op.first_head = input.edgy32(4);
    op.heads = 1 + input.edgy32(2);
    op.dims = 1 + input.edgy32(3);
    op.element_bytes = 1 + input.edgy32(3);
    op.source = side_of(input, op, static_cast<std::uint32_t>(draft.source_bytes.size()));
    op.target = side_of(input, op, static_cast<std::uint32_t>(draft.target_bytes.size()));
  }
  return draft;
}

/// Every byte of one side's copies lies inside its region.
void check_inside(std::uint32_t region, std::span<const std::uint64_t> sizes, std::uint64_t offset,
                  const StridedCopy& copy, std::uint64_t inner_stride, std::uint64_t outer_stride) {
  HOLDS(region < sizes.size());
  const wide end =
      wide{offset} + wide{copy.inner - 1} * inner_stride + wide{copy.outer - 1} * outer_stride + copy.run_bytes;
  HOLDS(end <= sizes[region]);
}

void note(Walk& walk, const StridedCopy& copy) {
  for (std::uint64_t outer = 0; outer < copy.outer; ++outer) {
    for (std::uint64_t inner = 0; inner < copy.inner; ++inner) {
      const auto from = copy.source_offset + outer * copy.source_outer_stride + inner * copy.source_inner_stride;
      const auto to = copy.target_offset + outer * copy.target_outer_stride + inner * copy.target_inner_stride;
      for (std::uint64_t byte = 0; byte < copy.run_bytes; ++byte) walk.emplace_back(from + byte, to + byte);
    }
  }
}

Walk walk_of(const Plan& plan, std::uint64_t begin, std::uint64_t end) {
  const Template& geometry = plan.geometry();
  Walk walk;
  walk.reserve(end - begin);
  std::uint64_t bytes = 0;
  plan.visit(begin, end, [&](const StridedCopy& copy) {
    HOLDS(copy.inner != 0 && copy.outer != 0 && copy.run_bytes != 0);
    bytes += copy.bytes();
    HOLDS(bytes <= end - begin);
    check_inside(copy.source_region, geometry.source_region_bytes(), copy.source_offset, copy, copy.source_inner_stride,
                 copy.source_outer_stride);
    check_inside(copy.target_region, geometry.target_region_bytes(), copy.target_offset, copy, copy.target_inner_stride,
                 copy.target_outer_stride);
    note(walk, copy);
  });
  HOLDS(bytes == end - begin);
  return walk;
}

/// The same bytes, gathered into a packed stream and scattered out of it, as the staged lane does.
void check_packed(const Plan& plan, std::uint64_t begin, std::uint64_t end, const Walk& whole) {
  Walk gathered;
  Walk scattered;
  plan.visit_source(begin, end, [&](const StridedCopy& copy) { note(gathered, copy); });
  plan.visit_target(begin, end, [&](const StridedCopy& copy) { note(scattered, copy); });
  HOLDS(gathered.size() == whole.size() && scattered.size() == whole.size());
  for (std::size_t at = 0; at < whole.size(); ++at) {
    HOLDS(gathered[at] == std::pair(whole[at].first, std::uint64_t{at}));
    HOLDS(scattered[at] == std::pair(std::uint64_t{at}, whole[at].second));
  }
}

void check_cells(const std::shared_ptr<const Plan>& plan, Sides side) {
  const SumCells cells(plan, side);
  const auto sizes =
      side == Sides::source ? plan->geometry().source_region_bytes() : plan->geometry().target_region_bytes();
  std::uint64_t rows = 0;
  cells.visit({0, std::min(plan->total_bytes(), kMostBytes)}, [&](const SumCells::Row& row) {
    const Side& where = side == Sides::source ? row.op->source : row.op->target;
    const wide end = wide{row.offset} + wide{row.tokens - 1} * where.token_stride +
                     wide{row.op->heads - 1} * where.head_stride + wide{row.op->dims - 1} * where.dim_stride +
                     row.op->element_bytes;
    HOLDS(row.tokens != 0 && end <= sizes[where.region]);
    HOLDS(row.first_cell + row.op->heads <= cells.count());
    ++rows;
  });
  HOLDS(rows != 0 || plan->total_bytes() == 0);
  if (cells.count() <= kMostBytes) HOLDS(cells.describe([](std::uint64_t) { return false; }).empty());
}

void check_plan(const std::shared_ptr<const Plan>& plan, fuzz::Input& input, std::uint64_t tokens) {
  const std::uint64_t total = plan->total_bytes();
  const std::uint64_t begin = total <= kMostBytes ? 0 : input.number<std::uint64_t>() % (total - kMostBytes);
  const std::uint64_t end = std::min(total, begin + kMostBytes);
  const Walk whole = walk_of(*plan, begin, end);
  const std::uint64_t cut = begin + (end == begin ? 0 : input.number<std::uint16_t>() % (end - begin));
  Walk parts = walk_of(*plan, begin, cut);
  const Walk rest = walk_of(*plan, cut, end);
  parts.insert(parts.end(), rest.begin(), rest.end());
  HOLDS(parts == whole);
  check_packed(*plan, begin, end, whole);
  for (const auto& range : plan->describe({begin, end}))
    HOLDS(range.first_token < range.end_token && range.first_head < range.end_head);
  const ByteRange missing{cut, end};
  HOLDS(plan->valid_prefix_tokens({&missing, 1}, tokens) <= tokens);
  if (total > (std::uint64_t{1} << 20U)) return;
  check_cells(plan, Sides::source);
  check_cells(plan, Sides::target);
}

std::vector<std::int32_t> table_of(fuzz::Input& input, std::uint32_t blocks) {
  std::vector<std::int32_t> table(input.below(9));
  for (std::size_t at = 0; at < table.size(); ++at) {
    const std::uint8_t kind = input.byte();
    if (kind < 128) table[at] = static_cast<std::int32_t>((at + kind) % blocks);
    if (kind >= 128 && kind < 144) table[at] = -1;
    if (kind >= 144) table[at] = static_cast<std::int32_t>(input.edgy32(blocks - 1));
  }
  return table;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const Draft draft = draft_of(input);
  try {
    const auto geometry = std::make_shared<const Template>(draft.ops, draft.groups, std::vector<std::string>{"a", "b"},
                                                           draft.source_bytes, draft.target_bytes);
    std::vector<std::vector<std::int32_t>> tables;
    for (const auto& group : geometry->groups()) {
      tables.push_back(table_of(input, group.source_num_blocks));
      tables.push_back(table_of(input, group.target_num_blocks));
    }
    std::vector<GroupTables> pairs;
    for (std::size_t at = 0; at < tables.size(); at += 2) pairs.push_back({tables[at], tables[at + 1]});
    const std::uint64_t first = input.edgy(8);
    const std::uint64_t end = input.edgy(40);
    check_plan(std::make_shared<const Plan>(geometry, pair_groups(*geometry, pairs, first, end)), input, end);
  } catch (const Error& error) {
    HOLDS(error.code() == Code::invalid_argument || error.code() == Code::not_offered);
  }
  return 0;
}
