// What the benchmarks measure against.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

#include "bindings.hpp"
#include "gil.hpp"
#include "kvlink/transport/memcpy_reference.hpp"
#include "kvlink/transport/socket_reference.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ReadBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WriteBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

double memcpy_seconds(const ReadBytes& source, const WriteBytes& target, const Offsets& source_offsets,
                      const Offsets& target_offsets, std::uint64_t run_bytes) {
  const kvlink::transport::ScatteredRuns runs{
      .source = std::as_bytes(std::span(source.data(), source.size())),
      .target = std::as_writable_bytes(std::span(target.data(), target.size())),
      .source_offsets = {source_offsets.data(), source_offsets.size()},
      .target_offsets = {target_offsets.data(), target_offsets.size()},
      .run_bytes = run_bytes,
  };
  const GilReleased unlocked;
  kvlink::transport::check_runs(runs);
  return kvlink::transport::seconds_of_memcpy(runs);
}

std::span<const std::uint64_t> checked_offsets(const Offsets& offsets, std::uint64_t run_bytes, std::size_t pool) {
  const std::span<const std::uint64_t> all{offsets.data(), offsets.size()};
  kvlink::transport::check_runs_of_socket(all, run_bytes, pool);
  return all;
}

void send_runs(int socket, const ReadBytes& pool, const Offsets& offsets, std::uint64_t run_bytes) {
  const GilReleased unlocked;
  kvlink::transport::send_runs(socket, std::as_bytes(std::span(pool.data(), pool.size())),
                               checked_offsets(offsets, run_bytes, pool.size()), run_bytes);
}

void receive_runs(int socket, const WriteBytes& pool, const Offsets& offsets, std::uint64_t run_bytes) {
  const GilReleased unlocked;
  kvlink::transport::receive_runs(socket, std::as_writable_bytes(std::span(pool.data(), pool.size())),
                                  checked_offsets(offsets, run_bytes, pool.size()), run_bytes);
}

}  // namespace

void bind_bench(nb::module_& module) {
  module.def("memcpy_seconds", &memcpy_seconds, nb::kw_only(), "source"_a, "target"_a, "source_offsets"_a,
             "target_offsets"_a, "run_bytes"_a,
             "Copy scattered runs with the C library's memcpy on this thread and return the seconds it took.\n\n"
             "Raises InvalidArgument if a run leaves its pool, or the two lists differ in length.");
  module.def("send_runs", &send_runs, nb::kw_only(), "socket"_a, "pool"_a, "offsets"_a, "run_bytes"_a,
             "Write scattered runs in order to a connected socket, by writev. The socket's own timeouts bound it.\n\n"
             "Raises InvalidArgument if a run leaves the pool, DeadlineExceeded after a timeout, or PeerLost.");
  module.def("receive_runs", &receive_runs, nb::kw_only(), "socket"_a, "pool"_a, "offsets"_a, "run_bytes"_a,
             "Read scattered runs in order from a connected socket, by readv. The socket's own timeouts bound it.\n\n"
             "Raises InvalidArgument if a run leaves the pool, DeadlineExceeded after a timeout, or PeerLost.");
}
