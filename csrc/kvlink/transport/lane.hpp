// The names of the lanes. Python chooses among them when peers connect; the numbers travel in CLAIM: never renumber.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvlink::transport {

enum class Lane : std::uint8_t { mapped = 1, vectored = 2, get = 3, staged = 4 };

[[nodiscard]] constexpr std::string_view lane_name(Lane lane) noexcept {
  switch (lane) {
    case Lane::mapped:
      return "mapped";
    case Lane::vectored:
      return "vectored";
    case Lane::get:
      return "get";
    case Lane::staged:
      return "staged";
  }
  return "unknown";
}

[[nodiscard]] constexpr std::optional<Lane> lane_from_name(std::string_view name) noexcept {
  for (const Lane lane : {Lane::mapped, Lane::vectored, Lane::get, Lane::staged}) {
    if (lane_name(lane) == name) return lane;
  }
  return std::nullopt;
}

/// What a peer's CLAIM says is a lane only if it is one of ours.
[[nodiscard]] constexpr std::optional<Lane> lane_from_number(std::uint8_t number) noexcept {
  if (number < 1 || number > 4) return std::nullopt;
  return static_cast<Lane>(number);
}

}  // namespace kvlink::transport
