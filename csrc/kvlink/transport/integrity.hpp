// The checksums that a handoff may ask for. The numbers travel in CLAIM and GRANT: never renumber, only append.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvlink::transport {

enum class Integrity : std::uint8_t { none = 0, crc32c = 1, xxh3 = 2 };

[[nodiscard]] constexpr std::string_view integrity_name(Integrity integrity) noexcept {
  switch (integrity) {
    case Integrity::none:
      return "";
    case Integrity::crc32c:
      return "crc32c";
    case Integrity::xxh3:
      return "xxh3";
  }
  return "unknown";
}

/// Bytes of one checksum, in memory and on the wire.
[[nodiscard]] constexpr std::uint32_t sum_bytes(Integrity integrity) noexcept {
  switch (integrity) {
    case Integrity::none:
      return 0;
    case Integrity::crc32c:
      return 4;
    case Integrity::xxh3:
      return 8;
  }
  return 0;
}

[[nodiscard]] constexpr std::optional<Integrity> integrity_from_name(std::string_view name) noexcept {
  for (const Integrity each : {Integrity::none, Integrity::crc32c, Integrity::xxh3}) {
    if (integrity_name(each) == name) return each;
  }
  return std::nullopt;
}

[[nodiscard]] constexpr std::optional<Integrity> integrity_from_number(std::uint8_t number) noexcept {
  if (number > 2) return std::nullopt;
  return static_cast<Integrity>(number);
}

}  // namespace kvlink::transport
