// Which bytes of a stream there are: the proof that a transfer is complete.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kvlink/transport/transfer.hpp"

namespace kvlink::transport {

/// A set of byte positions in [0, total). Adjacent ranges merge, so streams that arrive almost in
/// order cost a handful of entries.
class StreamCoverage {
 public:
  explicit StreamCoverage(std::uint64_t total_bytes) : total_bytes_(total_bytes) {}

  /// Adds a range. False, and nothing is added, when it is empty, reaches past the end or overlaps.
  [[nodiscard]] bool add(StreamRange range);

  [[nodiscard]] std::uint64_t covered_bytes() const noexcept { return covered_bytes_; }
  [[nodiscard]] bool complete() const noexcept { return covered_bytes_ == total_bytes_; }
  /// The gaps, ascending.
  [[nodiscard]] std::vector<StreamRange> missing() const;

 private:
  std::uint64_t total_bytes_;
  std::uint64_t covered_bytes_{0};
  std::map<std::uint64_t, std::uint64_t> ranges_;  // begin -> end, disjoint and not touching
};

}  // namespace kvlink::transport
