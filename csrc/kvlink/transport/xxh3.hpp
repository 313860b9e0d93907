// XXH3 with 64 bits, no seed and the usual secret: the same numbers as `xxhash.xxh3_64`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvlink::transport {

/// One hash, fed piece by piece.
class Xxh3 {
 public:
  Xxh3() noexcept;

  void update(const std::byte* data, std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t digest() const noexcept;

  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kStripeBytes = 64;

 private:
  static constexpr std::size_t kBufferBytes = 256;

  /// Whole stripes, all of which have more behind them.
  void consume(const std::byte* data, std::size_t stripes) noexcept;
  [[nodiscard]] std::uint64_t digest_long() const noexcept;

  alignas(64) std::array<std::uint64_t, kLanes> sums_;
  /// The last bytes, which may be the end: an end is hashed in another way. In front of their first byte lie, at the
  /// buffer's end, those before them.
  std::array<std::byte, kBufferBytes> buffer_;
  std::size_t buffered_{0};
  std::size_t stripes_{0};  // of the present block
  std::uint64_t total_bytes_{0};
};

}  // namespace kvlink::transport
