#include "kvlink/plan/repeats.hpp"

#include <bit>
#include <cstddef>
#include <vector>

namespace kvlink::plan {

std::optional<std::int32_t> find_repeat(std::span<const std::int32_t> table) {
  constexpr std::int32_t empty = -1;
  // A set with open addressing, at most half full. Sorting takes five times as long for a table in random order.
  const auto bits = std::bit_width(table.size() * 2);
  std::vector<std::int32_t> slots(std::size_t{1} << bits, empty);
  const auto mask = slots.size() - 1;
  for (const auto block : table) {
    if (block < 0) continue;
    // Multiplying by 2^64 / golden ratio puts neighbouring blocks far apart; the upper bits are the best mixed.
    auto slot =
        static_cast<std::size_t>((static_cast<std::uint64_t>(block) * 0x9E3779B97F4A7C15U) >> (64 - bits)) & mask;
    for (; slots[slot] != empty; slot = (slot + 1) & mask) {
      if (slots[slot] == block) return block;
    }
    slots[slot] = block;
  }
  return std::nullopt;
}

}  // namespace kvlink::plan
