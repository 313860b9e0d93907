// The `vectored` lane: the kernel copies from another process's memory, whoever allocated it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/transfer.hpp"
#include "kvlink/transport/unique_fd.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

/// A process whose memory can be read, and where its regions lie in it; one per peer, shared by its transfers.
struct VectoredSource {
  pid_t pid{};
  UniqueFd pidfd;  // tells the process from a later one that got the same pid
  std::vector<std::uint64_t> region_addresses;
};

/// Opens a source and reads one byte of its first region, to find out now whether this process may.
/// `pid` is the number that this process sees (SO_PEERCRED), not the one that the peer tells.
/// Throws Error(peer_lost) when there is no such process, Error(lane_unavailable) when reading is not permitted.
[[nodiscard]] std::shared_ptr<const VectoredSource> open_vectored_source(pid_t pid,
                                                                         std::vector<std::uint64_t> region_addresses);

/// `threads` and `waker` outlive the transfer. Throws Error(invalid_argument) when the regions of either side are not
/// those that the plan's template was checked for.
[[nodiscard]] std::shared_ptr<Transfer> make_vectored_transfer(std::shared_ptr<const plan::Plan> plan,
                                                               std::shared_ptr<const VectoredSource> source,
                                                               std::shared_ptr<const LocalMemory> target,
                                                               CopyThreads& threads, const Waker& waker);

}  // namespace kvlink::transport
