#include "kvlink/transport/memcpy_reference.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "kvlink/error.hpp"

namespace kvlink::transport {

namespace {

void check_side(const char* side, std::span<const std::uint64_t> offsets, std::uint64_t run_bytes, std::size_t pool) {
  const auto outside = std::ranges::find_if(
      offsets, [&](std::uint64_t offset) { return run_bytes > pool || offset > pool - run_bytes; });
  if (outside == offsets.end()) return;
  throw Error(Code::invalid_argument, std::string("copy runs by memcpy: the run of ") + std::to_string(run_bytes) +
                                          " bytes at offset " + std::to_string(*outside) + " leaves the " + side +
                                          " pool of " + std::to_string(pool) + " bytes");
}

}  // namespace

void check_runs(const ScatteredRuns& runs) {
  if (runs.source_offsets.size() != runs.target_offsets.size()) {
    throw Error(Code::invalid_argument, "copy runs by memcpy: " + std::to_string(runs.source_offsets.size()) +
                                            " source offsets for " + std::to_string(runs.target_offsets.size()) +
                                            " target offsets");
  }
  check_side("source", runs.source_offsets, runs.run_bytes, runs.source.size());
  check_side("target", runs.target_offsets, runs.run_bytes, runs.target.size());
}

double seconds_of_memcpy(const ScatteredRuns& runs) noexcept {
  const auto started = std::chrono::steady_clock::now();
  for (std::size_t index = 0; index < runs.source_offsets.size(); ++index) {
    std::memcpy(runs.target.data() + runs.target_offsets[index], runs.source.data() + runs.source_offsets[index],
                runs.run_bytes);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

}  // namespace kvlink::transport
