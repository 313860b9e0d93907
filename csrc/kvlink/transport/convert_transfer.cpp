#include "kvlink/transport/convert_transfer.hpp"

#include <algorithm>
#include <utility>

#include "kvlink/error.hpp"
#include "kvlink/transport/convert_kernels.hpp"
#include "kvlink/transport/copy_kernels.hpp"

namespace kvlink::transport {
namespace {

/// One copy of the conversion's plan: its grid, but with elements in place of bytes.
void convert_grid(const plan::Conversion& conversion, const LocalMemory& memory,
                  const plan::StridedCopy& grid) noexcept {
  const plan::DtypePair pair = conversion.pair(grid.source_region);
  const std::uint64_t to_bytes = plan::dtype_bytes(pair.to);
  const std::uint64_t from_bytes = plan::dtype_bytes(pair.from);
  const std::uint64_t count = grid.run_bytes / to_bytes;
  const auto in_scratch = [&](std::uint64_t counted) { return counted / to_bytes * from_bytes; };
  const std::byte* const source = memory.at(conversion.scratch_region(), in_scratch(grid.source_offset));
  std::byte* const target = memory.at(grid.target_region, grid.target_offset);
  const std::uint64_t source_outer = in_scratch(grid.source_outer_stride);
  const std::uint64_t source_inner = in_scratch(grid.source_inner_stride);
  for (std::uint64_t outer = 0; outer < grid.outer; ++outer) {
    for (std::uint64_t inner = 0; inner < grid.inner; ++inner) {
      convert_elements(source + outer * source_outer + inner * source_inner,
                       target + outer * grid.target_outer_stride + inner * grid.target_inner_stride, count, pair);
    }
  }
}

class Converter final : public SliceCopier {
 public:
  Converter(std::shared_ptr<const plan::Conversion> conversion, std::shared_ptr<const plan::Plan> plan,
            std::shared_ptr<const LocalMemory> memory)
      : conversion_(std::move(conversion)), plan_(std::move(plan)), memory_(std::move(memory)) {}

  std::uint64_t total_bytes() const noexcept override { return plan_->total_bytes(); }

  std::optional<SliceFailure> copy(StreamRange range) const noexcept override {
    plan_->visit(range.begin, range.end,
                 [this](const plan::StridedCopy& grid) noexcept { convert_grid(*conversion_, *memory_, grid); });
    finish_copies(range.end - range.begin);
    return std::nullopt;
  }

 private:
  std::shared_ptr<const plan::Conversion> conversion_;
  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const LocalMemory> memory_;
};

void check_memory(const plan::Conversion& conversion, const LocalMemory& memory) {
  const auto own = conversion.geometry().target_region_bytes();
  const auto& regions = memory.regions();
  const auto holds = [](const LocalRegion& region, std::uint64_t bytes) { return region.bytes >= bytes; };
  if (regions.size() != own.size() + 1 || regions.back().bytes < conversion.scratch_bytes() ||
      !std::equal(
          own.begin(), own.end(), regions.begin(),
          [&](std::uint64_t bytes, const LocalRegion& region) { return holds(region, bytes); })) {
    throw Error(Code::invalid_argument, "convert: the regions are not those that the conversion is made for");
  }
}

}  // namespace

std::shared_ptr<Transfer> make_convert_transfer(std::shared_ptr<const plan::Conversion> conversion,
                                                std::shared_ptr<const plan::Plan> plan,
                                                std::shared_ptr<const LocalMemory> memory, CopyThreads& threads,
                                                const Waker& waker) {
  check_memory(*conversion, *memory);
  return std::make_shared<SlicedTransfer>(
      std::make_unique<Converter>(std::move(conversion), std::move(plan), std::move(memory)), threads, waker);
}

void convert_now(const plan::Conversion& conversion, const plan::Plan& plan, const LocalMemory& memory) {
  check_memory(conversion, memory);
  plan.visit(0, plan.total_bytes(),
             [&](const plan::StridedCopy& grid) noexcept { convert_grid(conversion, memory, grid); });
  finish_copies(plan.total_bytes());
}

}  // namespace kvlink::transport
