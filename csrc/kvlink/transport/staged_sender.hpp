// The source side of the staged lane: gathers the plan's stream into chunks and sends them as messages.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "kvlink/error.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/transport/chunk_pool.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

class CopyThreads;
class LocalMemory;
class Waker;

/// Sends one attempt's stream to one target. Progress thread only, like a Transfer; the copies run on
/// the copy threads, which ring the waker when a chunk is ready to go, or here, one a turn, where those are few.
class StagedSender {
 public:
  /// Chunks are as large as `chunks` lends them. `window_chunks` is what the target said it takes unasked:
  /// that many chunks may be gathered or on their way before the target gives credit.
  StagedSender(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const LocalMemory> source,
               std::shared_ptr<ucx::Endpoint> endpoint, const AttemptId& attempt, std::shared_ptr<ChunkPool> chunks,
               std::uint32_t window_chunks, CopyThreads& copy_threads, const Waker& waker);
  ~StagedSender();
  StagedSender(const StagedSender&) = delete;
  StagedSender& operator=(const StagedSender&) = delete;

  void start() noexcept;
  /// Sends gathered chunks and gathers more. Returns whether it did anything.
  bool advance() noexcept;
  /// The target has scattered `chunks` more. More credit than chunks were sent is a protocol error.
  void credit(std::uint32_t chunks) noexcept;
  void cancel() noexcept;

  /// True for good once everything is sent, or after a stop once no thread reads source memory for this
  /// attempt any more. UCX may still hold copies of chunks; those are the worker's until it can let them go.
  [[nodiscard]] bool drained() const noexcept;
  /// Whether UCX has finished with every chunk and nothing failed. The target alone knows what arrived.
  [[nodiscard]] bool finished() const noexcept;
  [[nodiscard]] const AttemptId& attempt() const noexcept;
  [[nodiscard]] std::uint64_t sent_bytes() const noexcept;
  [[nodiscard]] std::optional<Failure> failure() const;
  [[nodiscard]] std::uint64_t post_ns() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlink::transport
