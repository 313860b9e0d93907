#include "kvlink/transport/crc32c.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvlink::transport {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78U;  // bits reversed
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

/// `tables[i][b]`: what byte `b` does to a CRC that has `i` more bytes to go.
[[nodiscard]] constexpr Tables make_tables() noexcept {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? kPolynomial : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t i = 1; i < tables.size(); ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[i - 1][byte];
      tables[i][byte] = (before >> 8U) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

[[nodiscard]] std::uint64_t load(const std::byte* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

[[nodiscard]] std::uint32_t by_tables(std::uint32_t crc, const std::byte* data, std::uint64_t bytes) noexcept {
  for (; bytes >= 8; bytes -= 8, data += 8) {
    const std::uint64_t word = load(data) ^ crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 0xffU];
  }
  for (; bytes != 0; --bytes, ++data) crc = (crc >> 8U) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(*data)) & 0xffU];
  return crc;
}

#if defined(__x86_64__)

[[gnu::target("sse4.2")]] std::uint32_t by_instruction(std::uint32_t crc, const std::byte* data,
                                                       std::uint64_t bytes) noexcept {
  std::uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, data += 8) wide = _mm_crc32_u64(wide, load(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes != 0; --bytes, ++data) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(*data));
  return crc;
}

[[gnu::target("sse4.2")]] void all_by_instruction(std::span<std::uint32_t, kCrcLanes> crcs,
                                                  const std::array<const std::byte*, kCrcLanes>& data,
                                                  std::uint64_t bytes) noexcept {
  std::uint64_t a = crcs[0];
  std::uint64_t b = crcs[1];
  std::uint64_t c = crcs[2];
  std::uint64_t d = crcs[3];
  std::uint64_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    a = _mm_crc32_u64(a, load(data[0] + at));
    b = _mm_crc32_u64(b, load(data[1] + at));
    c = _mm_crc32_u64(c, load(data[2] + at));
    d = _mm_crc32_u64(d, load(data[3] + at));
  }
  crcs[0] = static_cast<std::uint32_t>(a);
  crcs[1] = static_cast<std::uint32_t>(b);
  crcs[2] = static_cast<std::uint32_t>(c);
  crcs[3] = static_cast<std::uint32_t>(d);
  if (at == bytes) return;
  for (std::size_t lane = 0; lane < kCrcLanes; ++lane) {
    crcs[lane] = by_instruction(crcs[lane], data[lane] + at, bytes - at);
  }
}

[[nodiscard]] bool has_instruction() noexcept {
  static const bool supported = __builtin_cpu_supports("sse4.2") != 0;
  return supported;
}

#endif

}  // namespace

std::uint32_t crc32c_continue(std::uint32_t crc, const std::byte* data, std::uint64_t bytes) noexcept {
#if defined(__x86_64__)
  if (has_instruction()) return by_instruction(crc, data, bytes);
#endif
  return by_tables(crc, data, bytes);
}

void crc32c_continue_all(std::span<std::uint32_t, kCrcLanes> crcs, const std::array<const std::byte*, kCrcLanes>& data,
                         std::uint64_t bytes) noexcept {
#if defined(__x86_64__)
  if (has_instruction()) return all_by_instruction(crcs, data, bytes);
#endif
  for (std::size_t lane = 0; lane < kCrcLanes; ++lane) crcs[lane] = by_tables(crcs[lane], data[lane], bytes);
}

std::uint32_t crc32c_by_tables(std::uint32_t crc, const std::byte* data, std::uint64_t bytes) noexcept {
  return by_tables(crc, data, bytes);
}

}  // namespace kvlink::transport
