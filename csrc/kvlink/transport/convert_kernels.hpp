// The loops that turn elements of one dtype into elements of another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvlink/plan/conversion.hpp"

namespace kvlink::transport {

/// Converts `count` elements that lie one behind the other on both sides, at any alignment. The sides do not overlap.
///
/// Rounds to the nearest, ties to even; what is too large becomes infinite. A NaN stays one, with its sign and the
/// upper bits of its payload, and is quiet unless its bits are kept as they are. The bits are the same on every CPU.
void convert_elements(const std::byte* source, std::byte* target, std::uint64_t count, plan::DtypePair pair) noexcept;

/// The same one element after another, without what a CPU has for it: what the above must agree with.
void convert_elements_plainly(const std::byte* source, std::byte* target, std::uint64_t count,
                              plan::DtypePair pair) noexcept;

}  // namespace kvlink::transport
