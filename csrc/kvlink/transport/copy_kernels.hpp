// The copy loops. Everything that moves bytes inside this process goes through here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvlink/plan/plan.hpp"

namespace kvlink::transport {

/// How the target is written.
enum class Stores : std::uint8_t {
  cached,     // the target is read again soon: staging buffers, small handoffs
  streaming,  // non-temporal where the CPU has them: the target is larger than the cache
};

/// Copies the `outer x inner` runs of `grid`, its strides counted from `source` and `target` (its regions and offsets
/// are the caller's business). The two sides must not overlap. After streaming stores, `finish_copies` must run on the
/// same thread before anyone is told that the bytes are there.
void copy_grid(const std::byte* source, std::byte* target, const plan::StridedCopy& grid, Stores stores) noexcept;

/// Copies grids in the order in which they are added, each when the one behind it is known: the source of that one is
/// fetched from memory meanwhile, which a CPU does not do by itself where runs are short or blocks are scattered.
/// For a source that is not in the cache. One thread.
class CopySequence {
 public:
  explicit CopySequence(Stores stores) noexcept : stores_(stores) {}

  /// As `copy_grid`. Both sides stay valid until `finish` has returned.
  void add(const std::byte* source, std::byte* target, const plan::StridedCopy& grid) noexcept;
  /// Copies the last grid; then as `finish_copies`.
  void finish(std::uint64_t bytes) noexcept;

 private:
  struct Waiting {
    const std::byte* source{};
    std::byte* target{};
    plan::StridedCopy grid{};  // of no bytes: nothing waits
  };
  Stores stores_;
  Waiting last_{};
};

/// Makes streamed bytes visible to other threads and counts `bytes` as copied.
void finish_copies(std::uint64_t bytes) noexcept;

/// Bytes that copy loops of this process have written since it started. A handoff on `mapped` adds its size once:
/// more would be a hidden repack.
[[nodiscard]] std::uint64_t copied_bytes() noexcept;

/// Counts bytes that the kernel copied for us (vectored reads).
void count_copied(std::uint64_t bytes) noexcept;

/// Streaming stores pay above this much: less may be found in the cache by whoever reads it next.
inline constexpr std::uint64_t kStreamingBytes = std::uint64_t{2} << 20;

}  // namespace kvlink::transport
