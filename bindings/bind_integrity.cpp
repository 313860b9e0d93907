// Checksums for Python: tests compare them with others', benchmarks time them. Handoffs never come by here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/sum_cells.hpp"
#include "kvlink/transport/crc32c.hpp"
#include "kvlink/transport/summing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

namespace plan = kvlink::plan;
namespace transport = kvlink::transport;
using kvlink::Code;
using kvlink::Error;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RangeRow =
    std::tuple<std::string, std::string, std::string, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

[[nodiscard]] transport::Integrity integrity_of(const std::string& name) {
  const auto integrity = transport::integrity_from_name(name);
  if (!integrity || *integrity == transport::Integrity::none) {
    throw Error(Code::invalid_argument, "no checksum is called '" + name + "'; there are crc32c and xxh3");
  }
  return *integrity;
}

[[nodiscard]] std::span<const std::byte> span_of(const Bytes& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

std::uint64_t checksum(const std::string& name, const std::vector<Bytes>& pieces) {
  const auto integrity = integrity_of(name);
  std::vector<std::span<const std::byte>> spans;
  for (const Bytes& piece : pieces) spans.push_back(span_of(piece));
  const GilReleased released;
  return transport::sum_of(spans, integrity);
}

std::uint32_t crc32c_by_tables(const Bytes& bytes) {
  return ~transport::crc32c_by_tables(transport::kCrcBegin, span_of(bytes).data(), bytes.size());
}

[[nodiscard]] std::shared_ptr<const plan::SumCells> cells_of(const std::shared_ptr<plan::Plan>& of, bool target) {
  const plan::Sides side = target ? plan::Sides::target : plan::Sides::source;
  if (of->sides() != plan::Sides::both && of->sides() != side) {
    throw Error(Code::invalid_argument, "sum a plan: it does not address that side");
  }
  return std::make_shared<const plan::SumCells>(of, side);
}

nb::bytes sum_plan(const std::shared_ptr<plan::Plan>& of, const std::vector<Bytes>& regions, bool target,
                   const std::string& name, unsigned threads) {
  const auto stated = target ? of->geometry().target_region_bytes() : of->geometry().source_region_bytes();
  std::vector<transport::LocalRegion> local;
  for (const Bytes& region : regions) {
    local.push_back({.base = const_cast<std::byte*>(span_of(region).data()), .bytes = region.size()});  // only read
  }
  bool fits = local.size() == stated.size();
  for (std::size_t i = 0; fits && i < stated.size(); ++i) fits = local[i].bytes >= stated[i];
  if (!fits) throw Error(Code::invalid_argument, "sum a plan: the regions are not those that it is made for");
  const auto integrity = integrity_of(name);
  std::vector<std::byte> sums;
  {
    const GilReleased released;
    const transport::Waker waker;
    transport::CopyThreads copy_threads(threads);
    const auto memory = std::make_shared<const transport::LocalMemory>(std::move(local));
    transport::Summing summing(cells_of(of, target), integrity, memory, copy_threads, waker);
    summing.start();
    while (!summing.drained()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    sums.assign(summing.sums().begin(), summing.sums().end());
  }
  return nb::bytes(sums.data(), sums.size());
}

std::vector<RangeRow> describe_cells(const std::shared_ptr<plan::Plan>& of, bool target,
                                     const std::vector<std::uint64_t>& numbers) {
  const std::unordered_set<std::uint64_t> chosen(numbers.begin(), numbers.end());
  const auto ranges = cells_of(of, target)->describe([&](std::uint64_t cell) { return chosen.contains(cell); });
  std::vector<RangeRow> rows;
  for (const plan::FailedRange& range : ranges) {
    rows.emplace_back(of->geometry().groups()[range.group].name, of->geometry().layers()[range.layer],
                      std::string(plan::component_name(range.component)), range.first_head, range.end_head,
                      range.first_token, range.end_token);
  }
  return rows;
}

}  // namespace

void bind_integrity(nb::module_& m) {
  m.def("checksum", &checksum, "algorithm"_a, "pieces"_a, "Return the checksum of pieces, as if they were one.");
  m.def("crc32c_by_tables", &crc32c_by_tables, "data"_a, "Return a CRC-32C made without the processor's instruction.");
  m.def("sum_plan", &sum_plan, "plan"_a, "regions"_a, nb::kw_only(), "target"_a, "algorithm"_a, "threads"_a,
        "Return the checksums of all cells of one side of a plan, one after the other.");
  m.def("describe_cells", &describe_cells, "plan"_a, nb::kw_only(), "target"_a, "cells"_a,
        "Return what these cells are, as `Plan.describe` does.");
}
