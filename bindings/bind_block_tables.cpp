// Stage 4 for Python: block tables from the forms that engines have them in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "bindings.hpp"
#include "kvlink/error.hpp"
#include "kvlink/handoff/block_table.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvlink::Code;
using kvlink::Error;

/// A view of an array's memory, given back at the end. NumPy's own way, which costs a tenth of DLPack's.
class ArrayView {
 public:
  ArrayView(nb::handle array, int flags) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~ArrayView() { PyBuffer_Release(&view_); }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  [[nodiscard]] const Py_buffer& view() const noexcept { return view_; }

 private:
  Py_buffer view_{};
};

constexpr auto no_block_id = " holds something that is no block id";

[[noreturn]] void refuse(const std::string& called, const char* what) {
  throw Error(Code::invalid_argument, called + what);
}

/// An entry that is no plain int. NumPy's integers are block ids; bools are ints to Python, and are none.
nb::object as_int(PyObject* item, const std::string& called) {
  auto index = PyBool_Check(item) ? nb::object() : nb::steal(PyNumber_Index(item));
  if (index.is_valid()) return index;
  if (PyErr_Occurred() != nullptr && !PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  PyErr_Clear();
  const bool nested = PySequence_Check(item) && !PyUnicode_Check(item) && !PyBytes_Check(item);
  refuse(called, nested ? " has 2 dimensions or more; a block table has one" : no_block_id);
}

std::int32_t entry_of(PyObject* item, const std::string& called) {
  const auto entry = PyLong_CheckExact(item) ? nb::borrow(item) : as_int(item, called);
  int overflow = 0;
  const auto value = PyLong_AsLongLongAndOverflow(entry.ptr(), &overflow);
  if (overflow != 0 || value > std::numeric_limits<std::int32_t>::max() ||
      value < std::numeric_limits<std::int32_t>::min()) {
    refuse(called, no_block_id);
  }
  return static_cast<std::int32_t>(value);
}

/// Every entry is looked at, so that a table that is no table is refused wherever that shows.
void copy_list(nb::handle given, std::span<std::int32_t> table, const std::string& called) {
  const auto items = nb::steal(PySequence_Fast(given.ptr(), "a block table is a sequence"));
  if (!items.is_valid()) throw nb::python_error();
  // Functions in place of PySequence_Fast's macros, which the stable ABI does not have.
  const bool is_list = PyList_Check(items.ptr());
  // The size is asked for each time: an entry's `__index__` may be Python code that shortens the list.
  const auto size = [&] {
    return static_cast<std::size_t>(is_list ? PyList_Size(items.ptr()) : PyTuple_Size(items.ptr()));
  };
  for (std::size_t i = 0; i < size(); ++i) {
    const auto place = static_cast<Py_ssize_t>(i);
    const auto entry =
        entry_of(is_list ? PyList_GetItem(items.ptr(), place) : PyTuple_GetItem(items.ptr(), place), called);
    if (i < table.size()) table[i] = entry;
  }
  if (size() < table.size()) refuse(called, " became shorter while it was read");
}

void copy_array(nb::handle given, std::span<std::int32_t> table, const std::string& called) {
  const ArrayView array(given, PyBUF_STRIDES);
  const auto& view = array.view();
  if (view.ndim != 1 || view.itemsize != sizeof(std::int32_t) || static_cast<std::size_t>(view.shape[0]) < table.size())
    refuse(called, " is no array of int32 of the size that it said");
  const auto* entry = static_cast<const std::byte*>(view.buf);
  for (auto& into : table) {
    std::memcpy(&into, entry, sizeof into);
    entry += view.strides[0];
  }
}

void copy_block_table(nb::handle given, nb::handle into, std::uint32_t num_blocks, const char* called) {
  const ArrayView array(into, PyBUF_CONTIG);
  const auto& view = array.view();
  const std::span table{static_cast<std::int32_t*>(view.buf),
                        static_cast<std::size_t>(view.len) / sizeof(std::int32_t)};
  const std::string name(called);
  if (PyList_Check(given.ptr()) || PyTuple_Check(given.ptr()) || PyRange_Check(given.ptr())) {
    copy_list(given, table, name);
  } else {
    copy_array(given, table, name);
  }
  kvlink::handoff::check_block_table(table, num_blocks, name);
}

}  // namespace

void bind_block_tables(nb::module_& m) {
  m.def("copy_block_table", &copy_block_table, "given"_a, "into"_a, nb::kw_only(), "num_blocks"_a, "called"_a,
        "Copy the first entries of a list, a tuple, a range or an array of int32 into the array of int32 `into`.\n\n"
        "Raises ``InvalidArgument`` for something that is no block id, and for a block out of range or twice in\n"
        "`into`; `called` is what the message calls the table.");
}
