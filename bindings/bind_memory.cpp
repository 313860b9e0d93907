// Stage 3, memory: pools for Python, and their export by the buffer protocol and DLPack.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/error.hpp"
#include "kvlink/transport/copy_kernels.hpp"
#include "kvlink/transport/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvlink::Code;
using kvlink::Error;
using kvlink::transport::Pool;

std::uintptr_t address_of(const Pool& pool) {
  return reinterpret_cast<std::uintptr_t>(pool.base());
}

/// Bytes of a packed array; throws Error(invalid_argument) for dimensions or a product that no memory has.
std::uint64_t packed_bytes(const std::vector<std::int64_t>& shape, std::int64_t element_bytes) {
  std::int64_t bytes = element_bytes;
  bool fits = element_bytes > 0;
  for (const std::int64_t extent : shape) {
    fits = fits && extent > 0 && !__builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (!fits) {
    throw Error(Code::invalid_argument,
                "allocate a buffer: every dimension must be positive, and the whole under 2^63 bytes");
  }
  return static_cast<std::uint64_t>(bytes);
}

/// A pool seen as one packed array. Views of it keep it, and so the pool, alive. Immutable but for the bytes.
class PoolBuffer {
 public:
  PoolBuffer(const std::vector<std::int64_t>& shape, std::int64_t element_bytes, std::string format)
      : format_(std::move(format)), element_bytes_(element_bytes) {
    const std::uint64_t bytes = packed_bytes(shape, element_bytes);
    shape_.assign(shape.begin(), shape.end());
    strides_.assign(shape.size(), element_bytes);
    for (std::size_t i = shape.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape_[i];
    const GilReleased unlocked;
    pool_ = Pool::create(bytes);
  }

  [[nodiscard]] const std::shared_ptr<Pool>& pool() const noexcept { return pool_; }

  /// Fills the request of a consumer, such as memoryview; `exporter` is the Python object of this buffer.
  int export_to(Py_buffer* view, int flags, PyObject* exporter) noexcept {
    view->buf = pool_->base();
    view->len = static_cast<Py_ssize_t>(pool_->bytes());
    view->itemsize = element_bytes_;
    view->readonly = 0;
    view->ndim = static_cast<int>(shape_.size());
    view->format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? format_.data() : nullptr;
    view->shape = (flags & PyBUF_ND) == PyBUF_ND ? shape_.data() : nullptr;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? strides_.data() : nullptr;
    view->suboffsets = nullptr;
    view->internal = nullptr;
    Py_INCREF(exporter);
    view->obj = exporter;
    return 0;
  }

 private:
  std::string format_;
  Py_ssize_t element_bytes_;
  std::vector<Py_ssize_t> shape_;
  std::vector<Py_ssize_t> strides_;
  std::shared_ptr<Pool> pool_;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
  view->obj = nullptr;
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_BufferError, "the buffer was not initialised");
    return -1;
  }
  return nb::inst_ptr<PoolBuffer>(self)->export_to(view, flags, self);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

/// A carrier of DLPack capsules over memory that `owner` keeps alive.
nb::ndarray<nb::array_api> dlpack_view(std::uintptr_t address, const std::vector<std::size_t>& shape,
                                       std::pair<std::uint8_t, std::uint8_t> element, std::uint16_t lanes,
                                       std::pair<int, int> device, const nb::object& owner) {
  return {reinterpret_cast<void*>(address),  // NOLINT
          shape.size(),
          shape.data(),
          owner,
          nullptr,
          nb::dlpack::dtype{.code = element.first, .bits = element.second, .lanes = lanes},
          device.first,
          device.second};
}

void bind_pool(nb::module_& module) {
  nb::class_<Pool>(module, "Pool", "Memory that other processes of the host can map: one sealed memfd.")
      .def_prop_ro("address", &address_of, "First byte, in this process.")
      .def_prop_ro("nbytes", &Pool::bytes, "Size of the whole allocation.")
      .def(
          "open_read_only", [](const Pool& pool) { return pool.open_read_only().release(); },
          "Return a new descriptor that cannot be mapped writable; the caller closes it.\n\n"
          "Raises OutOfMemory without a free descriptor, LaneUnavailable where the kernel can give no such promise.");
  module.def("pool_of", &Pool::find, "address"_a, nb::sig("def pool_of(address: int) -> Pool | None"),
             "Return the live pool that contains `address`.");
  module.def("copied_bytes", &kvlink::transport::copied_bytes,
             "Return how many bytes the copy loops of this process have written.");
}

}  // namespace

void bind_memory(nb::module_& module) {
  bind_pool(module);
  nb::class_<PoolBuffer>(module, "PoolBuffer", nb::type_slots(buffer_slots), nb::is_weak_referenceable(),
                         "One pool as a packed, writable array, by the buffer protocol.")
      .def(nb::init<const std::vector<std::int64_t>&, std::int64_t, std::string>(), "shape"_a, nb::kw_only(),
           "element_bytes"_a, "format"_a, "Allocate it, zero-filled. Raises InvalidArgument and OutOfMemory.")
      .def_prop_ro("pool", &PoolBuffer::pool, "The pool behind it.");
  module.def("dlpack_view", &dlpack_view, nb::kw_only(), "address"_a, "shape"_a, "element"_a, "lanes"_a, "device"_a,
             "owner"_a,
             nb::sig("def dlpack_view(*, address: int, shape: list[int], element: tuple[int, int], lanes: int, "
                     "device: tuple[int, int], owner: object) -> typing.Any"),
             "Return a carrier of DLPack capsules over memory that `owner` keeps alive.\n\n"
             "`element` is DLPack's (type code, bits), `device` its (device type, device id).");
}
