// The native module: the table of contents.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

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
}
