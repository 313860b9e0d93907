// Stage 2. Whether a block stands twice in a block table.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace kvlink::plan {

/// The first block that stands in the table for a second time. Entries below 0 are holes. Takes time and memory by the
/// length of the table, whatever its entries are.
[[nodiscard]] std::optional<std::int32_t> find_repeat(std::span<const std::int32_t> table);

}  // namespace kvlink::plan
