// The registered regions of this process, as the copy loops address them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvlink/transport/transfer.hpp"

namespace kvlink::transport {

/// All regions of one node, in the order of its layout's `region_bytes`. Borrows the memory.
class LocalMemory {
 public:
  explicit LocalMemory(std::vector<LocalRegion> regions) : regions_(std::move(regions)) {}

  /// Unchecked: offsets come from a plan whose template was checked against the sizes of these regions.
  [[nodiscard]] std::byte* at(std::uint32_t region, std::uint64_t offset) const noexcept {
    return regions_[region].base + offset;
  }
  [[nodiscard]] const std::vector<LocalRegion>& regions() const noexcept { return regions_; }

 private:
  std::vector<LocalRegion> regions_;
};

}  // namespace kvlink::transport
