// Stage 3, UCX: loading the library and opening a context, for kvlink.transport. Nothing here moves bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/ucx/context.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"
#include "kvlink/transport/ucx/library.hpp"
#include "kvlink/transport/ucx/log.hpp"
#include "kvlink/transport/ucx/worker.hpp"

namespace nb = nanobind;
using namespace nb::literals;
namespace ucx = kvlink::transport::ucx;

namespace {

std::shared_ptr<ucx::Context> open_context(const std::string& library_path,
                                           std::vector<std::pair<std::string, std::string>> settings, bool one_sided) {
  const GilReleased unlocked;
  return std::make_shared<ucx::Context>(ucx::Library::load(library_path),
                                        ucx::ContextOptions{.settings = std::move(settings), .one_sided = one_sided});
}

/// What two nodes with contexts like these two would use, asked of an endpoint that is never connected.
std::string transports_between(const std::shared_ptr<ucx::Context>& here, const std::shared_ptr<ucx::Context>& there,
                               bool same_host) {
  const GilReleased unlocked;
  const auto router = std::make_shared<kvlink::transport::ChunkRouter>();
  const auto local = ucx::Worker::create(here, router);
  const auto remote = ucx::Worker::create(there, router);
  const auto mode = same_host ? ucx::FailureMode::none : ucx::FailureMode::peer;
  return ucx::Endpoint(local, remote->address(), mode, "a worker of this process").transports();
}

}  // namespace

void bind_ucx(nb::module_& m) {
  nb::class_<ucx::Context>(m, "UcxContext", "One UCX context: the transports and devices that a node may use.")
      .def(nb::new_(&open_context), nb::kw_only(), "library_path"_a, "settings"_a, "one_sided"_a,
           "Load `library_path` (once a process) and open a context.\n\n"
           "`settings` are UCX's own, without ``UCX_``; variables that the user has set win over them.\n\n"
           "Raises UcxUnavailable if the library cannot be used or refuses the settings.")
      .def_prop_ro(
          "version", [](const ucx::Context& context) { return context.library().version(); }, "UCX's version.")
      .def_prop_ro(
          "library_path", [](const ucx::Context& context) { return context.library().path(); },
          "The libucp file in use.")
      .def_prop_ro("one_sided", &ucx::Context::one_sided, "Whether peers may read registered memory.")
      .def_prop_ro("overruled", &ucx::Context::overruled, "UCX_ variables that won over kvlink's settings.")
      .def("describe", &ucx::Context::describe, nb::call_guard<GilReleased>(),
           "Return what UCX prints about its memory domains, transports and devices.")
      .def("transports_to", &transports_between, "other"_a, nb::kw_only(), "same_host"_a,
           "Return the transports between two workers of these contexts, such as ``\"cma/memory posix/memory\"``.\n\n"
           "Raises LaneUnavailable if there are none.");
  m.def("ucx_log", &ucx::recent_log, "Return UCX's latest errors and warnings, oldest first.");
}
