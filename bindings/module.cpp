// The native module: the table of contents.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace {

/// An interpreter frees nothing that a daemon thread still holds when it ends. nanobind would call that a leak.
void check_no_leaks_beside_threads(const nb::module_& m) {
  const nb::object check = nb::cpp_function([] {
    if (nb::len(nb::module_::import_("sys").attr("_current_frames")()) > 1) nb::set_leak_warnings(false);
  });
  // At exit the newest finalizer runs first, so this one runs once all nodes are closed.
  nb::module_::import_("weakref").attr("finalize")(m, check);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of kvlink. Private: the public names are those of the kvlink package.";
  bind_errors();
  bind_plan(m);
  bind_conversion(m);
  bind_memory(m);
  bind_ucx(m);
  bind_block_tables(m);
  bind_handoff(m);
  bind_integrity(m);
  bind_faults(m);
  bind_bench(m);
  check_no_leaks_beside_threads(m);
}
