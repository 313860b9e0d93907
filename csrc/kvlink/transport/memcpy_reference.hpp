// Stage 3. What the lanes of one host are measured against: memcpy of the same scattered runs on one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvlink::transport {

/// Runs of one length, scattered over two pools: run `i` lies at `source_offsets[i]` and goes to `target_offsets[i]`.
struct ScatteredRuns {
  std::span<const std::byte> source;
  std::span<std::byte> target;
  std::span<const std::uint64_t> source_offsets;
  std::span<const std::uint64_t> target_offsets;
  std::uint64_t run_bytes{};
};

/// Throws Error(invalid_argument) unless both lists are of one length and every run lies inside both pools.
void check_runs(const ScatteredRuns& runs);

/// Copies every run in order on the calling thread and returns how long that took. Expects `check_runs` to have passed.
[[nodiscard]] double seconds_of_memcpy(const ScatteredRuns& runs) noexcept;

}  // namespace kvlink::transport
