// Stage 3. The seam between a lane and the handoff that uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kvlink/error.hpp"

namespace kvlink::transport {

/// Memory of this process that handoffs read or write. Borrowed: Python keeps it alive until the node is closed.
struct LocalRegion {
  std::byte* base{};
  std::uint64_t bytes{};
};

/// Half-open range of the plan's byte stream.
struct StreamRange {
  std::uint64_t begin{};
  std::uint64_t end{};
};

/// One plan on its way through one lane, seen from the target. Every method is called on the progress thread.
///
/// The owner calls `start` once, then `advance` on each turn of the loop until `drained`. A transfer that
/// needs a turn while the loop sleeps wakes it through the Waker it was made with.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  /// Starts moving; returns after posting, never after waiting.
  virtual void start() noexcept = 0;

  /// Takes finished pieces into account and posts more. Returns whether it did anything.
  virtual bool advance() noexcept = 0;

  /// Asks to stop soon. Idempotent; `drained` still turns true by itself.
  virtual void cancel() noexcept = 0;

  /// True for good once nothing of this transfer will touch target memory any more, done or not.
  [[nodiscard]] virtual bool drained() const noexcept = 0;

  /// Bytes that arrived. Equal to the plan's total if and only if every piece arrived.
  [[nodiscard]] virtual std::uint64_t moved_bytes() const noexcept = 0;

  /// The first cause, if anything failed. Meaningful once drained.
  [[nodiscard]] virtual std::optional<Failure> failure() const = 0;

  /// What did not arrive, in ascending order. Meaningful once drained.
  [[nodiscard]] virtual std::vector<StreamRange> missing() const = 0;

  /// Nanoseconds spent handing work to the lane (posting), apart from moving.
  [[nodiscard]] virtual std::uint64_t post_ns() const noexcept = 0;
};

}  // namespace kvlink::transport
