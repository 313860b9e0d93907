// From an incoming chunk to the transfer that waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "kvlink/ids.hpp"
#include "kvlink/transport/chunk_header.hpp"
#include "kvlink/transport/received_data.hpp"

namespace kvlink::transport {

/// What takes chunks. Called inside a UCX callback: must not throw, block or call UCX.
class ChunkSink {
 public:
  ChunkSink() = default;
  ChunkSink(const ChunkSink&) = delete;
  ChunkSink& operator=(const ChunkSink&) = delete;
  virtual ~ChunkSink() = default;
  /// `data` has the length that the header says. Dropping it refuses the chunk. What is not lent is scattered (or
  /// copied) before this returns.
  virtual void on_chunk(const ChunkHeader& header, ReceivedData data) noexcept = 0;
};

/// Chunks of attempts that nobody waits for (late, stale, hostile) are dropped and counted.
/// Progress thread only.
class ChunkRouter {
 public:
  /// To be called before the source is asked to send. Replaces what the attempt had.
  void attach(const AttemptId& attempt, std::shared_ptr<ChunkSink> sink);
  /// Late chunks of the attempt are dropped from here on. Idempotent.
  void detach(const AttemptId& attempt) noexcept;

  /// One message as it came from a peer.
  void deliver(std::span<const std::byte> header, ReceivedData data) noexcept;
  /// One message that cannot be taken: counted only.
  void refuse() noexcept { ++dropped_; }

  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  std::map<AttemptId, std::shared_ptr<ChunkSink>> sinks_;
  std::uint64_t dropped_{0};
};

}  // namespace kvlink::transport
