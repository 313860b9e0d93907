// Conversions for Python: compiled at connect next to templates. The rest is here for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/conversion.hpp"
#include "kvlink/transport/convert_kernels.hpp"
#include "kvlink/transport/convert_transfer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

namespace plan = kvlink::plan;
namespace transport = kvlink::transport;

using Names = std::pair<std::string, std::string>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

plan::DtypePair pair_of(const Names& names) {
  const auto from = plan::dtype_from_name(names.first);
  const auto to = plan::dtype_from_name(names.second);
  if (!from || !to) {
    throw kvlink::Error(kvlink::Code::invalid_argument, "convert: " + names.first + " does not become " + names.second);
  }
  return {*from, *to};
}

std::shared_ptr<plan::Conversion> make_conversion(std::shared_ptr<plan::Template> geometry,
                                                  const std::vector<Names>& pairs, std::uint64_t scratch_bytes) {
  std::vector<plan::DtypePair> native;
  for (const Names& names : pairs) native.push_back(pair_of(names));
  return std::make_shared<plan::Conversion>(std::move(geometry), std::move(native), scratch_bytes);
}

/// The two plans that a node makes of one request.
std::pair<std::shared_ptr<plan::Plan>, std::shared_ptr<plan::Plan>> steps_of(
    const plan::Conversion& conversion, const std::shared_ptr<plan::Template>& geometry, const plan::Plan& whole) {
  std::vector<std::vector<plan::BlockPair>> pairs;
  for (std::size_t group = 0; group < geometry->groups().size(); ++group) {
    const auto of_group = whole.pairs(group);
    pairs.emplace_back(of_group.begin(), of_group.end());
  }
  auto steps = conversion.steps_of(*geometry, std::move(pairs));
  return {std::make_shared<plan::Plan>(geometry, std::move(steps.arrive)),
          std::make_shared<plan::Plan>(*steps.convert)};
}

void run(const plan::Conversion& conversion, const plan::Plan& converting,
         const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& regions) {
  std::vector<transport::LocalRegion> native;
  for (const auto& [address, bytes] : regions) {
    native.push_back({.base = reinterpret_cast<std::byte*>(address), .bytes = bytes});
  }
  transport::convert_now(conversion, converting, transport::LocalMemory(std::move(native)));
}

void convert_elements(const ReadBytes& source, const Bytes& target, const Names& names, nb::handle plainly) {
  const plan::DtypePair pair = pair_of(names);
  const std::uint64_t count = source.size() / plan::dtype_bytes(pair.from);
  if (count * plan::dtype_bytes(pair.from) != source.size() || count * plan::dtype_bytes(pair.to) != target.size()) {
    throw kvlink::Error(kvlink::Code::invalid_argument, "convert: the two sides have unlike numbers of elements");
  }
  const auto* from = reinterpret_cast<const std::byte*>(source.data());
  auto* to = reinterpret_cast<std::byte*>(target.data());
  const bool is_plain = nb::cast<bool>(plainly);
  const GilReleased released;
  is_plain ? transport::convert_elements_plainly(from, to, count, pair)
           : transport::convert_elements(from, to, count, pair);
}

}  // namespace

void bind_conversion(nb::module_& m) {
  nb::class_<plan::Conversion>(m, "Conversion",
                               "What becomes of elements that arrive in another dtype. Immutable.\n\n"
                               "Made by ``kvlink.plan.compile_conversion``.")
      .def(nb::new_(&make_conversion), nb::kw_only(), "template"_a, "pairs"_a, "scratch_bytes"_a,
           "Check and keep the numbers. See ``csrc/kvlink/plan/conversion.hpp``.")
      .def_prop_ro("scratch_bytes", &plan::Conversion::scratch_bytes, "Size of the scratch memory of one part.")
      .def("steps", &steps_of, "template"_a, "plan"_a,
           "Return the plan that moves what `plan` asks for into scratch memory, and the one that converts it.")
      .def("run", &run, "plan"_a, "regions"_a,
           "Execute the second plan at once, in `regions` of (address, nbytes): those of the target and scratch\n"
           "memory behind them. Nodes do that on their copy threads; this is for tests.");
  m.def("convert_elements", &convert_elements, "source"_a, "target"_a, "pair"_a, nb::kw_only(), "plainly"_a = false,
        "Convert bytes that hold elements of the first dtype of `pair` to the second; `plainly`: without what the CPU\n"
        "has for it. For tests and benchmarks.");
}
