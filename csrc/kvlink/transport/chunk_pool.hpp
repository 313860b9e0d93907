// Buffers between gathering and sending, reused so that no chunk pays for page faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kvlink::transport {

/// A bounded set of buffers of one size. Thread-safe. One pool per peer: a peer that never takes
/// what it was sent then starves nobody else.
class ChunkPool : public std::enable_shared_from_this<ChunkPool> {
 public:
  /// A buffer on loan; goes back to its pool when destroyed, on any thread.
  class Chunk {
   public:
    Chunk() = default;
    Chunk(std::shared_ptr<ChunkPool> pool, std::unique_ptr<std::byte[]> buffer) noexcept
        : pool_(std::move(pool)), buffer_(std::move(buffer)) {}
    Chunk(Chunk&&) = default;
    Chunk& operator=(Chunk&& other) noexcept;
    ~Chunk();
    explicit operator bool() const noexcept { return buffer_ != nullptr; }
    [[nodiscard]] std::byte* data() const noexcept { return buffer_.get(); }

   private:
    std::shared_ptr<ChunkPool> pool_;
    std::unique_ptr<std::byte[]> buffer_;
  };

  ChunkPool(std::uint32_t chunk_bytes, std::uint32_t limit_chunks);

  /// An empty loan when all are out: try again after some came back.
  [[nodiscard]] Chunk borrow() noexcept;
  [[nodiscard]] std::uint32_t chunk_bytes() const noexcept { return chunk_bytes_; }
  [[nodiscard]] std::uint32_t lent() const noexcept;

 private:
  void give_back(std::unique_ptr<std::byte[]> buffer) noexcept;

  const std::uint32_t chunk_bytes_;
  const std::uint32_t limit_chunks_;
  mutable std::mutex mutex_;
  std::uint32_t lent_{0};
  std::vector<std::unique_ptr<std::byte[]>> idle_;
};

}  // namespace kvlink::transport
