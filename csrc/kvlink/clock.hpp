// One clock for every deadline: monotonic nanoseconds of this host. Never compared with another host's.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvlink {

[[nodiscard]] inline std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline constexpr std::int64_t kNsPerMs = 1'000'000;

}  // namespace kvlink
