// Memory that another process of the host can map: what kvlink.empty hands out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvlink/transport/unique_fd.hpp"

namespace kvlink::transport {

/// Owns a mapping made by mmap.
class MappedBytes {
 public:
  /// Takes over `[base, base + bytes)`.
  MappedBytes(std::byte* base, std::uint64_t bytes) noexcept : base_(base), bytes_(bytes) {}
  MappedBytes(const MappedBytes&) = delete;
  MappedBytes& operator=(const MappedBytes&) = delete;
  ~MappedBytes();

  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* base_;
  std::uint64_t bytes_;
};

/// One zero-filled memfd, mapped read-write here. Its size is sealed, so that a peer which maps it can never
/// meet SIGBUS, and sealed against further writable mappings, so that a peer can never write to it.
///
/// Pages are committed on first touch, by the thread (and so on the NUMA node) that touches them.
class Pool {
 public:
  /// Throws Error(invalid_argument) for zero bytes, Error(out_of_memory) when memory or descriptors run out.
  [[nodiscard]] static std::shared_ptr<Pool> create(std::uint64_t bytes);

  /// The live pool that contains `address`, or null.
  [[nodiscard]] static std::shared_ptr<Pool> find(std::uintptr_t address);

  Pool(UniqueFd fd, std::byte* base, std::uint64_t bytes) noexcept;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  [[nodiscard]] std::byte* base() const noexcept { return mapping_.base(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return mapping_.bytes(); }
  [[nodiscard]] int fd() const noexcept { return fd_.value(); }

  /// A new descriptor for a peer, which neither it nor anyone it passes it to can map or write writable.
  /// Throws Error(out_of_memory) when descriptors run out, Error(lane_unavailable) when the kernel can give no such
  /// promise.
  [[nodiscard]] UniqueFd open_read_only() const;

 private:
  UniqueFd fd_;
  MappedBytes mapping_;
};

}  // namespace kvlink::transport
