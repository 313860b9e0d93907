#include "kvlink/transport/copy_staging.hpp"

#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/copy_kernels.hpp"

namespace kvlink::transport {

// A gathered chunk is sent at once, so its stores are cached. Blocks of a large plan are written past the cache: half
// the traffic to memory, and the chunk that is read stays in the cache.

void gather(const plan::Plan& plan, std::uint64_t begin, std::uint64_t end, const LocalMemory& source,
            std::byte* out) noexcept {
  CopySequence copies(Stores::cached);
  plan.visit_source(begin, end, [&](const plan::StridedCopy& copy) noexcept {
    copies.add(source.at(copy.source_region, copy.source_offset), out + copy.target_offset, copy);
  });
  copies.finish(end - begin);
}

void scatter(const plan::Plan& plan, std::uint64_t begin, std::uint64_t end, const std::byte* in,
             const LocalMemory& target) noexcept {
  const Stores stores = plan.total_bytes() >= kStreamingBytes ? Stores::streaming : Stores::cached;
  plan.visit_target(begin, end, [&](const plan::StridedCopy& copy) noexcept {
    copy_grid(in + copy.source_offset, target.at(copy.target_region, copy.target_offset), copy, stores);
  });
  finish_copies(end - begin);
}

}  // namespace kvlink::transport
