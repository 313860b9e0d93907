// How fast bytes come from a peer, or go to it.
#pragma once

#include <cstdint>

namespace kvlink::handoff {

/// Bytes over the time in which anything moved, whatever moved beside it; what is older counts less and less. A few
/// additions a handoff. Progress thread only.
class RateMeter {
 public:
  /// One more transfer moves.
  void begin(std::int64_t now) noexcept {
    if (moving_++ == 0) since_ns_ = now;
  }
  /// One of them has stopped, and brought so many bytes.
  void end(std::int64_t now, std::uint64_t bytes) noexcept {
    bytes_ += static_cast<double>(bytes);
    busy_ns_ += static_cast<double>(now - since_ns_);
    since_ns_ = now;
    --moving_;
    while (busy_ns_ > kRecentNs) {
      bytes_ /= 2;
      busy_ns_ /= 2;
    }
  }
  /// Of what has ended; 0 before anything has.
  [[nodiscard]] double bytes_per_s() const noexcept { return busy_ns_ > 0 ? bytes_ / busy_ns_ * 1e9 : 0.0; }

 private:
  static constexpr double kRecentNs = 2e9;  // of moving

  std::uint64_t moving_{0};
  std::int64_t since_ns_{0};
  double bytes_{0};
  double busy_ns_{0};
};

}  // namespace kvlink::handoff
