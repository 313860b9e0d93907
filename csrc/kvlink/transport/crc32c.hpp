// CRC-32 with Castagnoli's polynomial, as iSCSI and ext4 use it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvlink::transport {

inline constexpr std::size_t kCrcLanes = 4;
inline constexpr std::uint32_t kCrcBegin = 0xffffffffU;

/// Goes on with a CRC that began as `kCrcBegin`. The CRC itself is the inverse of what this returns at the end.
[[nodiscard]] std::uint32_t crc32c_continue(std::uint32_t crc, const std::byte* data, std::uint64_t bytes) noexcept;

/// The same for four of one length, side by side: the instruction takes three cycles, and one may begin in each.
void crc32c_continue_all(std::span<std::uint32_t, kCrcLanes> crcs, const std::array<const std::byte*, kCrcLanes>& data,
                         std::uint64_t bytes) noexcept;

/// What runs where the processor has no such instruction. The tests compare the two.
[[nodiscard]] std::uint32_t crc32c_by_tables(std::uint32_t crc, const std::byte* data, std::uint64_t bytes) noexcept;

}  // namespace kvlink::transport
