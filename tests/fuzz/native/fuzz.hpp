// What all native fuzz targets share: reading choices out of an input, and ending at the first thing that does not
// hold.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>

namespace kvlink::fuzz {

/// Unlike CHECK of the tests it ends so that the fuzzer keeps the input.
#define HOLDS(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

using Bytes = std::span<const std::byte>;

/// Reads an input from its front. Past its end everything is zero, so that every input means something.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(std::as_bytes(std::span(data, size))) {}

  template <std::unsigned_integral Number>
  [[nodiscard]] Number number() {
    Number value{};
    const Bytes raw = bytes(sizeof value);
    if (!raw.empty()) std::memcpy(&value, raw.data(), raw.size());
    return value;
  }
  [[nodiscard]] std::uint8_t byte() { return number<std::uint8_t>(); }
  [[nodiscard]] bool flag() { return (byte() & 1U) != 0; }
  /// One byte's worth: `end` is at most 256.
  [[nodiscard]] std::uint32_t below(std::uint32_t end) { return byte() % end; }
  /// Small nearly always, else near one of the places where numbers go wrong, or anything.
  [[nodiscard]] std::uint64_t edgy(std::uint32_t most) {
    const std::uint8_t kind = byte();
    if (kind < 232) return kind % (most + 1);
    const std::uint64_t near = byte();
    if (kind < 236) return std::uint64_t{most} + near;
    if (kind < 240) return (std::uint64_t{1} << 31U) - 8 + near;
    if (kind < 244) return (std::uint64_t{1} << 32U) - 8 + near;
    if (kind < 248) return (std::uint64_t{1} << 63U) - 8 + near;
    if (kind < 252) return std::numeric_limits<std::uint64_t>::max() - near;
    return number<std::uint64_t>();
  }
  [[nodiscard]] std::uint32_t edgy32(std::uint32_t most) { return static_cast<std::uint32_t>(edgy(most)); }
  [[nodiscard]] Bytes bytes(std::size_t most) {
    const Bytes taken = rest_.first(std::min(most, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] bool empty() const { return rest_.empty(); }

 private:
  Bytes rest_;
};

}  // namespace kvlink::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
