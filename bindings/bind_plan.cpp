// Stage 2 for Python: templates are compiled here at connect; plans are here for tests and for `bench plan`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/block_pairs.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/plan/template.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

namespace plan = kvlink::plan;

using SideNumbers = std::array<std::uint64_t, 6>;
using OpNumbers = std::tuple<std::array<std::uint32_t, 7>, SideNumbers, SideNumbers>;
using GroupNumbers = std::tuple<std::string, std::vector<std::uint32_t>>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::uint64_t everything = std::numeric_limits<std::uint64_t>::max();

plan::Side side_of(const SideNumbers& numbers) {
  if (numbers[0] > std::numeric_limits<std::uint32_t>::max()) {
    throw kvlink::Error(kvlink::Code::invalid_argument, "compile a template: a region index overflows 32 bits");
  }
  return {.region = static_cast<std::uint32_t>(numbers[0]),
          .offset = numbers[1],
          .block_stride = numbers[2],
          .token_stride = numbers[3],
          .head_stride = numbers[4],
          .dim_stride = numbers[5]};
}

plan::Op op_of(const OpNumbers& numbers) {
  const auto& what = std::get<0>(numbers);
  return {.group = what[0],
          .layer = what[1],
          .component = what[2],
          .first_head = what[3],
          .heads = what[4],
          .dims = what[5],
          .element_bytes = what[6],
          .source = side_of(std::get<1>(numbers)),
          .target = side_of(std::get<2>(numbers))};
}

plan::GroupGeometry group_of(const GroupNumbers& numbers) {
  const auto& counts = std::get<1>(numbers);
  if (counts.size() != 7 && counts.size() != 9) {
    throw kvlink::Error(kvlink::Code::invalid_argument, "compile a template: group " + std::get<0>(numbers) + " has " +
                                                            std::to_string(counts.size()) + " numbers");
  }
  plan::GroupGeometry group{.name = std::get<0>(numbers),
                            .source_index = counts[0],
                            .target_index = counts[1],
                            .source_block_tokens = counts[2],
                            .target_block_tokens = counts[3],
                            .source_num_blocks = counts[4],
                            .target_num_blocks = counts[5],
                            .window = counts[6]};
  if (counts.size() == 9) {
    group.slots = counts[7] != 0;
    group.target_block_pool = counts[8];
  }
  return group;
}

std::shared_ptr<plan::Template> make_template(const std::vector<OpNumbers>& ops,
                                              const std::vector<GroupNumbers>& groups, std::vector<std::string> layers,
                                              std::vector<std::uint64_t> source_region_bytes,
                                              std::vector<std::uint64_t> target_region_bytes) {
  std::vector<plan::Op> native_ops;
  for (const auto& op : ops) native_ops.push_back(op_of(op));
  std::vector<plan::GroupGeometry> native_groups;
  for (const auto& group : groups) native_groups.push_back(group_of(group));
  return std::make_shared<plan::Template>(std::move(native_ops), std::move(native_groups), std::move(layers),
                                          std::move(source_region_bytes), std::move(target_region_bytes));
}

std::span<const std::int32_t> span_of(const Table& table) {
  return {table.data(), table.shape(0)};
}

std::shared_ptr<plan::Plan> make_plan(const std::shared_ptr<plan::Template>& geometry, const std::vector<Table>& source,
                                      const std::vector<Table>& target, std::uint64_t first_token,
                                      std::uint64_t end_token) {
  if (source.size() != target.size()) {
    throw kvlink::Error(kvlink::Code::invalid_argument, "plan copies: " + std::to_string(source.size()) +
                                                            " source tables for " + std::to_string(target.size()) +
                                                            " target tables");
  }
  std::vector<plan::GroupTables> tables;
  for (std::size_t i = 0; i < source.size(); ++i) tables.push_back({span_of(source[i]), span_of(target[i])});
  const GilReleased unlocked;
  return std::make_shared<plan::Plan>(geometry, plan::pair_groups(*geometry, tables, first_token, end_token));
}

/// The plan of a staged lane's sender or receiver, which knows the blocks of its own side only.
std::shared_ptr<plan::Plan> make_one_sided(const std::shared_ptr<plan::Template>& geometry, const plan::Plan& whole,
                                           const std::string& side) {
  if (side != "source" && side != "target") {
    throw kvlink::Error(kvlink::Code::invalid_argument, "plan copies: there is no side called " + side);
  }
  std::vector<std::vector<plan::BlockPair>> pairs;
  for (std::size_t group = 0; group < geometry->groups().size(); ++group) {
    const auto of_group = whole.pairs(group);
    pairs.emplace_back(of_group.begin(), of_group.end());
    for (auto& pair : pairs.back()) (side == "source" ? pair.target_block : pair.source_block) = -1;
  }
  return std::make_shared<plan::Plan>(geometry, std::move(pairs));
}

using CopyRow = std::array<std::uint64_t, 11>;

CopyRow row_of(const plan::StridedCopy& copy) noexcept {
  return {copy.source_region,
          copy.target_region,
          copy.source_offset,
          copy.target_offset,
          copy.run_bytes,
          copy.inner,
          copy.outer,
          copy.source_inner_stride,
          copy.target_inner_stride,
          copy.source_outer_stride,
          copy.target_outer_stride};
}

nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<2>> copies_of(const plan::Plan& plan, std::uint64_t begin,
                                                             std::uint64_t end, const std::string& packed_side) {
  auto rows = std::make_unique<std::vector<CopyRow>>();
  const auto keep = [&rows](const plan::StridedCopy& copy) { rows->push_back(row_of(copy)); };
  if (packed_side.empty()) {
    plan.visit(begin, end, keep);
  } else if (packed_side == "target") {
    plan.visit_source(begin, end, keep);
  } else if (packed_side == "source") {
    plan.visit_target(begin, end, keep);
  } else {
    throw kvlink::Error(kvlink::Code::invalid_argument, "list copies: there is no side called " + packed_side);
  }
  const auto count = rows->size();
  auto* data = count == 0 ? nullptr : rows->front().data();
  nb::capsule owner(rows.release(), [](void* held) noexcept { delete static_cast<std::vector<CopyRow>*>(held); });
  return {data, {count, std::tuple_size_v<CopyRow>}, owner};
}

/// A lane that only counts: copies, runs, and a checksum that keeps the compiler from skipping them.
struct CountingLane {
  std::uint64_t copies{};
  std::uint64_t runs{};
  std::uint64_t offsets{};

  void operator()(const plan::StridedCopy& copy) noexcept {
    ++copies;
    runs += std::uint64_t{copy.inner} * copy.outer;
    offsets ^= copy.source_offset + copy.target_offset;
  }
};

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> count_copies(const plan::Plan& plan, std::uint64_t begin,
                                                                     std::uint64_t end) {
  CountingLane lane;
  plan.visit(begin, end, lane);
  return {lane.copies, lane.runs, lane.offsets};
}

using RangeRow =
    std::tuple<std::string, std::string, std::string, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

std::vector<RangeRow> describe(const plan::Plan& plan, std::uint64_t begin, std::uint64_t end) {
  std::vector<RangeRow> rows;
  for (const auto& range : plan.describe({begin, end})) {
    rows.emplace_back(plan.geometry().groups()[range.group].name, plan.geometry().layers()[range.layer],
                      std::string(plan::component_name(range.component)), range.first_head, range.end_head,
                      range.first_token, range.end_token);
  }
  return rows;
}

std::uint64_t valid_prefix_tokens(const plan::Plan& plan,
                                  const std::vector<std::pair<std::uint64_t, std::uint64_t>>& missing,
                                  std::uint64_t num_tokens) {
  std::vector<plan::ByteRange> ranges;
  for (const auto& [begin, end] : missing) ranges.push_back({begin, end});
  return plan.valid_prefix_tokens(ranges, num_tokens);
}

void bind_template(nb::module_& m) {
  nb::class_<plan::Template>(m, "Template",
                             "The copies of one block pair, for everything that both sides hold. Immutable.\n\n"
                             "Made by ``kvlink.plan.compile_template``.")
      .def(
          nb::new_(&make_template), nb::kw_only(), "ops"_a, "groups"_a, "layers"_a, "source_region_bytes"_a,
          "target_region_bytes"_a,
          "Check and keep the numbers.\n\n"
          "An op is ``((group, layer, component, first_head, heads, dims, element_bytes), source, target)``; a side "
          "is\n"
          "``(region, offset, block_stride, token_stride, head_stride, dim_stride)``; a group is ``(name,\n"
          "(source_index, target_index, source_block_tokens, target_block_tokens, source_num_blocks,\n"
          "target_num_blocks, window, slots, target_block_pool))``, without the last two where blocks hold tokens and\n"
          "are the group's own. Raises ``InvalidArgument`` for whatever does not fit its region.")
      .def_prop_ro(
          "layers",
          [](const plan::Template& self) {
            return std::vector<std::string>(self.layers().begin(), self.layers().end());
          },
          "Global layer names, by the index that ops use.")
      .def_prop_ro(
          "groups",
          [](const plan::Template& self) {
            std::vector<std::string> names;
            for (const auto& group : self.groups()) names.push_back(group.name);
            return names;
          },
          "Names of the groups, in the target's order.")
      .def_prop_ro(
          "op_count", [](const plan::Template& self) { return self.ops().size(); }, "Number of ops.")
      .def(
          "token_bytes",
          [](const plan::Template& self, const std::string& name) {
            for (std::size_t i = 0; i < self.groups().size(); ++i) {
              if (self.groups()[i].name == name) return self.token_bytes(i);
            }
            throw kvlink::Error(kvlink::Code::invalid_argument, "count bytes: there is no group called " + name);
          },
          "group"_a, "Bytes that one token of a group, or one slot, has in all layers together.");
}

void bind_copy_plan(nb::module_& m) {
  nb::class_<plan::Plan>(m, "Plan",
                         "The copies of one request, seen as one stream of bytes. Immutable.\n\n"
                         "Nodes make their own; this is for tests and benchmarks.")
      .def(nb::new_(&make_plan), "template"_a, "source_tables"_a, "target_tables"_a, nb::kw_only(), "first_token"_a = 0,
           "end_token"_a,
           "Pair the block tables, one a group in the template's order, for tokens ``[first_token, end_token)``.\n\n"
           "Raises ``InvalidArgument`` for blocks out of range, twice in a target or missing, and ``NotOffered``\n"
           "for a hole of the source that the target wants.")
      .def_static("one_sided", &make_one_sided, "template"_a, "plan"_a, "side"_a,
                  "Return the same plan as the process of one side knows it: the other side's blocks are left out.")
      .def_prop_ro("total_bytes", &plan::Plan::total_bytes, "Length of the stream.")
      .def(
          "copies", &copies_of, "begin"_a = 0, "end"_a = everything, nb::kw_only(), "packed"_a = "",
          "List the copies of ``[begin, end)`` as rows of source region, target region, source offset, target offset,\n"
          "run bytes, inner, outer, and the inner and outer strides of source and target.\n\n"
          "`packed` names the side that is the packed stream instead of memory, if any.")
      .def("count_copies", &count_copies, "begin"_a = 0, "end"_a = everything, nb::call_guard<GilReleased>(),
           "Visit ``[begin, end)`` as a lane would and return the number of copies, of runs, and a checksum.")
      .def("describe", &describe, "begin"_a, "end"_a,
           "Return ``(group, layer, component, first_head, end_head, first_token, end_token)`` of what lies in\n"
           "``[begin, end)``.")
      .def("valid_prefix_tokens", &valid_prefix_tokens, "missing"_a, nb::kw_only(), "num_tokens"_a,
           "Return how many tokens from the start are right although the ranges `missing` did not arrive.");
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_template(m);
  bind_copy_plan(m);
}
