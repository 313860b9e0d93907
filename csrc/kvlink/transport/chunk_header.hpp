// The header of one message of a staged transfer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvlink/ids.hpp"

namespace kvlink::transport {

/// Says which bytes of whose stream a chunk carries.
struct ChunkHeader {
  AttemptId attempt;
  std::uint64_t stream_begin{};
  std::uint32_t length{};

  static constexpr std::size_t encoded_bytes = 4 + 16 + 8 + 4 + 8 + 4;
  using Encoded = std::array<std::byte, encoded_bytes>;

  [[nodiscard]] Encoded encode() const noexcept;
  /// Nothing unless `bytes` is exactly one header of this version.
  [[nodiscard]] static std::optional<ChunkHeader> decode(std::span<const std::byte> bytes) noexcept;
};

}  // namespace kvlink::transport
