#include "kvlink/transport/mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "kvlink/error.hpp"

namespace kvlink::transport {
namespace {

void check_descriptor(int fd, std::uint64_t expected_bytes) {
  if (expected_bytes == 0 || expected_bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw Error(Code::protocol_error, "map a peer's pool: a size of " + std::to_string(expected_bytes) +
                                          " bytes is not one that a pool can have");
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(Code::protocol_error,
                "map a peer's pool: the descriptor is not a memfd sealed against shrinking; "
                "its owner could end this process by truncating it");
  }
  struct stat status{};
  // Sealed first, then measured: the size can only have been larger in between.
  if (::fstat(fd, &status) != 0 || status.st_size < 0 || static_cast<std::uint64_t>(status.st_size) < expected_bytes) {
    throw Error(Code::protocol_error, "map a peer's pool: it has " + std::to_string(status.st_size) +
                                          " bytes, but its layout states " + std::to_string(expected_bytes));
  }
}

std::byte* map_read_only(int fd, std::uint64_t bytes) {
  check_descriptor(fd, bytes);
  void* base = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    throw Error(Code::out_of_memory,
                "map a peer's pool of " + std::to_string(bytes) + " bytes: mmap: " + std::strerror(errno));
  }
  return static_cast<std::byte*>(base);
}

}  // namespace

Mapping::Mapping(UniqueFd fd, std::uint64_t expected_bytes)
    : mapping_(map_read_only(fd.value(), expected_bytes), expected_bytes) {}

}  // namespace kvlink::transport
