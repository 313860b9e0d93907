// A peer's pool, seen from this process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvlink/transport/pool.hpp"
#include "kvlink/transport/unique_fd.hpp"

namespace kvlink::transport {

/// Maps the descriptor of a peer's pool read-only. Keeps the memory alive after the peer's death; whether the
/// peer still stands behind the bytes is for CONFIRM and VALID to say.
class Mapping {
 public:
  /// Closes `fd` in any case. The descriptor is hostile until checked: throws Error(protocol_error) when it is not a
  /// memfd sealed against shrinking (reading it could raise SIGBUS) or holds fewer than `expected_bytes`,
  /// Error(out_of_memory) when it cannot be mapped.
  Mapping(UniqueFd fd, std::uint64_t expected_bytes);

  [[nodiscard]] const std::byte* base() const noexcept { return mapping_.base(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return mapping_.bytes(); }

 private:
  MappedBytes mapping_;
};

}  // namespace kvlink::transport
