// Identity of handoffs: who minted it, which one, and which try.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvlink {

/// 128 random bits of one node's life. Compared for equality only: a restarted node has another.
using Epoch = std::array<std::uint8_t, 16>;

/// One handoff, unique over all nodes and restarts.
struct HandoffId {
  Epoch epoch{};
  std::uint64_t sequence{};
  auto operator<=>(const HandoffId&) const = default;
};

/// For messages: the first bytes of the epoch and the sequence, such as `7f3a90c1-12`.
[[nodiscard]] inline std::string text_of(const HandoffId& id) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < 4; ++i) {
    text += digits[id.epoch[i] >> 4U];
    text += digits[id.epoch[i] & 15U];
  }
  return text + "-" + std::to_string(id.sequence);
}

/// One try at a handoff: late messages of an earlier try must not be taken for this one.
struct AttemptId {
  HandoffId handoff{};
  std::uint32_t attempt{};
  auto operator<=>(const AttemptId&) const = default;
};

}  // namespace kvlink
