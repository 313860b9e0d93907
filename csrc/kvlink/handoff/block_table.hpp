// Stage 4. A block table that a user gives, before anything is started.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace kvlink::handoff {

/// Throws Error(invalid_argument) for an entry that is neither a block of the group nor -1, and for a block that
/// appears twice. `called` is what the message calls the table.
void check_block_table(std::span<const std::int32_t> table, std::uint32_t num_blocks, const std::string& called);

}  // namespace kvlink::handoff
