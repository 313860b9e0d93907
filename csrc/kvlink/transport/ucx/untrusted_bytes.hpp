// Bytes of a peer on their way into UCX, whose parsers take no length.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvlink/error.hpp"

namespace kvlink::transport::ucx {

/// A copy followed by zeros, so that a parser led past the end reads zeros instead of the heap. Throws
/// Error(protocol_error) for nothing or more than `limit_bytes`. What remains: on garbage, UCX's parsers may assert and
/// end the process, so only what an authenticated peer sent may come here.
[[nodiscard]] inline std::vector<std::byte> padded_copy(std::span<const std::byte> bytes, std::size_t limit_bytes,
                                                        std::string_view operation) {
  if (bytes.empty() || bytes.size() > limit_bytes) {
    throw Error(Code::protocol_error, std::string(operation) + ": the peer sent " + std::to_string(bytes.size()) +
                                          " bytes where 1 to " + std::to_string(limit_bytes) + " are allowed");
  }
  // One-byte lengths are the longest jumps in these formats, a few of them in a row.
  constexpr std::size_t kPadding = 4096;
  std::vector<std::byte> padded(bytes.size() + kPadding);
  std::copy(bytes.begin(), bytes.end(), padded.begin());
  return padded;
}

}  // namespace kvlink::transport::ucx
