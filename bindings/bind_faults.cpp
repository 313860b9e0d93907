// For kvlink.testing: faults by script and seed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/handoff/engine.hpp"
#include "kvlink/transport/fault_script.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvlink::handoff::Engine;
using kvlink::transport::FaultCounts;
using kvlink::transport::FaultScript;

/// What is counted; holds nothing of the node. Not const inside, for nanobind's sake.
struct Counted {
  std::shared_ptr<const FaultCounts> counts;
};

nb::dict read_counts(const Counted& counted) {
  const FaultCounts& counts = *counted.counts;
  nb::dict out;
  out["transfers"] = counts.transfers.load();
  out["pieces"] = counts.pieces.load();
  out["dropped"] = counts.dropped.load();
  out["duplicated"] = counts.duplicated.load();
  out["corrupted"] = counts.corrupted.load();
  out["refused"] = counts.refused.load();
  out["failed"] = counts.failed.load();
  out["late"] = counts.late.load();
  out["midway"] = counts.midway.load();
  return out;
}

}  // namespace

void bind_faults(nb::module_& m) {
  nb::class_<Counted>(m, "FaultCounts", "What came of one script. Outlives the node.")
      .def("read", &read_counts, "Return the counts by name.");
  m.def(
      "inject_faults",
      [](Engine& engine, std::uint64_t seed, double delay_ms, double drop, double duplicate, double corrupt,
         bool reorder, std::optional<std::uint64_t> fail_after_bytes, std::uint32_t no_resource, bool like_rc,
         double error_after_ms) {
        return Counted{engine.inject_faults(FaultScript{.seed = seed,
                                                        .delay_ms = delay_ms,
                                                        .drop = drop,
                                                        .duplicate = duplicate,
                                                        .corrupt = corrupt,
                                                        .reorder = reorder,
                                                        .fail_after_bytes = fail_after_bytes,
                                                        .no_resource = no_resource,
                                                        .like_rc = like_rc,
                                                        .error_after_ms = error_after_ms})};
      },
      "engine"_a, nb::kw_only(), "seed"_a, "delay_ms"_a, "drop"_a, "duplicate"_a, "corrupt"_a, "reorder"_a,
      "fail_after_bytes"_a.none(), "no_resource"_a, "like_rc"_a, "error_after_ms"_a, nb::call_guard<GilReleased>(),
      "For tests: make the transfers that start from now on go wrong by this script.");
  m.def(
      "remove_faults", [](Engine& engine) { (void)engine.inject_faults(std::nullopt); }, "engine"_a,
      nb::call_guard<GilReleased>(), "For tests: transfers that start from now on go right again.");
}
