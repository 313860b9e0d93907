// What module.cpp calls: one function a stage.
#pragma once

#include <nanobind/nanobind.h>

namespace kvlink::handoff {
class Engine;
}

void bind_errors();
void bind_plan(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_ucx(nanobind::module_& m);
void bind_block_tables(nanobind::module_& m);
void bind_handoff(nanobind::module_& m);
/// Of bind_handoff: bind_push.cpp.
void bind_push_calls(nanobind::class_<kvlink::handoff::Engine>& engine);
void bind_push_handle(nanobind::module_& m);
void bind_integrity(nanobind::module_& m);
void bind_faults(nanobind::module_& m);
void bind_bench(nanobind::module_& m);

/// The class name in kvlink/errors.py; bind_errors.cpp.
namespace kvlink {
enum class Code : unsigned char;
}
const char* class_name_of(kvlink::Code code) noexcept;
/// The code of a class name; throws Error(invalid_argument) for a name that is none.
kvlink::Code code_of_class_name(const char* name);
