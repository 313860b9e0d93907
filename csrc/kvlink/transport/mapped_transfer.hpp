// The `mapped` lane: copies from a peer's pool that this process has mapped.
#pragma once

#include <memory>
#include <vector>

#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/mapping.hpp"
#include "kvlink/transport/transfer.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

/// Where the source's regions can be reached; one per peer, shared by its transfers.
/// Each mapping has at least the bytes that the source's layout states for the region.
struct MappedSource {
  std::vector<std::shared_ptr<const Mapping>> regions;
};

/// `threads` and `waker` outlive the transfer. Throws Error(invalid_argument) when a region of either side is smaller
/// than the plan's template was checked for.
[[nodiscard]] std::shared_ptr<Transfer> make_mapped_transfer(std::shared_ptr<const plan::Plan> plan,
                                                             std::shared_ptr<const MappedSource> source,
                                                             std::shared_ptr<const LocalMemory> target,
                                                             CopyThreads& threads, const Waker& waker);

}  // namespace kvlink::transport
