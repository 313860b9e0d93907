#include "kvlink/transport/chunk_pool.hpp"

#include <new>
#include <utility>

namespace kvlink::transport {

ChunkPool::Chunk& ChunkPool::Chunk::operator=(Chunk&& other) noexcept {
  const Chunk old(std::move(*this));
  pool_ = std::move(other.pool_);
  buffer_ = std::move(other.buffer_);
  return *this;
}

ChunkPool::Chunk::~Chunk() {
  if (buffer_) pool_->give_back(std::move(buffer_));
}

ChunkPool::ChunkPool(std::uint32_t chunk_bytes, std::uint32_t limit_chunks)
    : chunk_bytes_(chunk_bytes), limit_chunks_(limit_chunks) {
  idle_.reserve(limit_chunks);
}

ChunkPool::Chunk ChunkPool::borrow() noexcept {
  std::unique_ptr<std::byte[]> buffer;
  {
    const std::lock_guard lock(mutex_);
    if (lent_ == limit_chunks_) return {};
    ++lent_;
    if (!idle_.empty()) {
      buffer = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  // Not zeroed: what is sent has been gathered into it before.
  if (!buffer) buffer.reset(new (std::nothrow) std::byte[chunk_bytes_]);
  if (!buffer) {
    const std::lock_guard lock(mutex_);
    --lent_;
    return {};
  }
  return {shared_from_this(), std::move(buffer)};
}

std::uint32_t ChunkPool::lent() const noexcept {
  const std::lock_guard lock(mutex_);
  return lent_;
}

void ChunkPool::give_back(std::unique_ptr<std::byte[]> buffer) noexcept {
  const std::lock_guard lock(mutex_);
  --lent_;
  idle_.push_back(std::move(buffer));  // never allocates: reserved for the limit
}

}  // namespace kvlink::transport
