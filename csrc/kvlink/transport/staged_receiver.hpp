// The target side of the staged lane: checks every chunk against the plan, then scatters it.
#pragma once

#include <cstdint>
#include <memory>

#include "kvlink/ids.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/transfer.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

class CopyThreads;
class LocalMemory;
class Waker;

/// The Transfer of the staged lane. `start` only begins to listen: make it, attach it to the worker's
/// ChunkRouter under its attempt, then ask the source to send. Detach it when it has drained.
class StagedReceiver : public Transfer, public ChunkSink {
 public:
  /// `window_chunks` is what the source was told; a source that sends more at once breaks the protocol,
  /// and the transfer fails.
  [[nodiscard]] static std::shared_ptr<StagedReceiver> create(std::shared_ptr<const plan::Plan> plan,
                                                              std::shared_ptr<const LocalMemory> target,
                                                              std::uint32_t window_chunks, CopyThreads& copy_threads,
                                                              const Waker& waker);

  /// Chunks scattered since the last call: the credit to send to the source.
  [[nodiscard]] virtual std::uint32_t take_credits() noexcept = 0;
};

}  // namespace kvlink::transport
