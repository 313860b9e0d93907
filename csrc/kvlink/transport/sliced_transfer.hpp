// What the lanes that copy by themselves share: the plan's stream is cut into slices, copy threads take them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/transfer.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

/// Why a slice failed, in a form that a copy thread can store without allocating.
struct SliceFailure {
  Code code{};
  const char* cause{};  // a literal
  int error_number{};
};

/// How one lane copies part of a plan's stream. Shared by copy threads, hence const.
class SliceCopier {
 public:
  SliceCopier() = default;
  SliceCopier(const SliceCopier&) = delete;
  SliceCopier& operator=(const SliceCopier&) = delete;
  virtual ~SliceCopier() = default;

  [[nodiscard]] virtual std::uint64_t total_bytes() const noexcept = 0;
  /// Copies the whole range and makes it visible to other threads, or says why not.
  [[nodiscard]] virtual std::optional<SliceFailure> copy(StreamRange range) const noexcept = 0;
};

/// The plan's offsets are checked against what its template states; this checks that against the memory there is.
/// Throws Error(invalid_argument).
void check_target(const plan::Plan& plan, const LocalMemory& target);

/// The slices of one transfer. Copy threads share it with the SlicedTransfer, so either may go first.
class SliceJob final : public CopyJob {
 public:
  /// Small enough that cancelling takes well under a millisecond, large enough that the queue's lock does not show.
  static constexpr std::uint64_t kSliceBytes = std::uint64_t{1} << 20;

  SliceJob(std::unique_ptr<const SliceCopier> copier, const Waker& waker);

  std::optional<std::uint64_t> claim() noexcept override;
  void run(std::uint64_t slice) noexcept override;

  /// No slice is claimed from now on; running ones finish.
  void stop() noexcept;
  /// No slice runs and none will.
  [[nodiscard]] bool over() const noexcept;
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return copier_->total_bytes(); }
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept;
  [[nodiscard]] std::optional<SliceFailure> failure() const;
  [[nodiscard]] std::vector<StreamRange> missing() const;

 private:
  [[nodiscard]] StreamRange range_of(std::uint64_t slice) const noexcept;
  [[nodiscard]] bool is_over(std::uint64_t word) const noexcept;
  void fail(const SliceFailure& failure) noexcept;

  std::unique_ptr<const SliceCopier> copier_;
  const Waker& waker_;
  const std::uint64_t slices_;
  // Stop flag, running slices and next slice in one word, so that "over" is one load and, once true, stays true.
  std::atomic<std::uint64_t> word_{0};
  std::atomic<std::uint64_t> moved_{0};
  std::vector<std::atomic<std::uint8_t>> arrived_;  // by slice
  mutable std::mutex failure_mutex_;
  std::optional<SliceFailure> failure_;  // guarded by failure_mutex_; the first one
};

/// A Transfer whose bytes are moved by copy threads of this process; those of a small one at once, by `start`.
class SlicedTransfer final : public Transfer {
 public:
  /// A few microseconds of copying, and as many transfers in one turn of the loop as its window lets start.
  static constexpr std::uint64_t kInlineBytes = std::uint64_t{64} << 10;

  /// `threads` and `waker` outlive the transfer and every slice of it.
  SlicedTransfer(std::unique_ptr<const SliceCopier> copier, CopyThreads& threads, const Waker& waker);
  /// Stops unclaimed slices. Running ones still write: destroy only once drained, or with the target memory kept.
  ~SlicedTransfer() override;

  void start() noexcept override;
  bool advance() noexcept override;
  void cancel() noexcept override;
  [[nodiscard]] bool drained() const noexcept override;
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override;
  [[nodiscard]] std::optional<Failure> failure() const override;
  [[nodiscard]] std::vector<StreamRange> missing() const override;
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return post_ns_; }

 private:
  void submit() noexcept;

  CopyThreads& threads_;
  std::shared_ptr<SliceJob> job_;
  bool submitted_{false};
  bool cancelled_{false};
  std::uint64_t seen_bytes_{0};
  std::uint64_t post_ns_{0};
};

}  // namespace kvlink::transport
