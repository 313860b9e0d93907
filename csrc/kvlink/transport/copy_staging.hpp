// Between scattered blocks and a contiguous chunk: what the staged lane does at both of its ends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvlink/transport/local_memory.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

/// Writes stream bytes `[begin, end)` of the plan, taken from its source side, to `out`. Any thread.
void gather(const plan::Plan& plan, std::uint64_t begin, std::uint64_t end, const LocalMemory& source,
            std::byte* out) noexcept;

/// Writes stream bytes `[begin, end)` of the plan, held by `in`, to its target side. Any thread.
void scatter(const plan::Plan& plan, std::uint64_t begin, std::uint64_t end, const std::byte* in,
             const LocalMemory& target) noexcept;

}  // namespace kvlink::transport
