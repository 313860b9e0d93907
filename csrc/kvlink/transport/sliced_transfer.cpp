#include "kvlink/transport/sliced_transfer.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::transport {
namespace {

// The word of a SliceJob: | stopped: 1 | running: 15 | next slice: 48 |
constexpr std::uint64_t kStopped = std::uint64_t{1} << 63;
constexpr std::uint64_t kOneRunning = std::uint64_t{1} << 48;
constexpr std::uint64_t kRunningMask = kStopped - kOneRunning;
constexpr std::uint64_t kNextMask = kOneRunning - 1;

}  // namespace

void check_target(const plan::Plan& plan, const LocalMemory& target) {
  const auto stated = plan.geometry().target_region_bytes();
  bool fits = target.regions().size() == stated.size();
  for (std::size_t i = 0; fits && i < stated.size(); ++i) fits = target.regions()[i].bytes >= stated[i];
  if (!fits) throw Error(Code::invalid_argument, "copy: the target's regions are not those that the plan is made for");
}

SliceJob::SliceJob(std::unique_ptr<const SliceCopier> copier, const Waker& waker)
    : copier_(std::move(copier)),
      waker_(waker),
      slices_((copier_->total_bytes() + kSliceBytes - 1) / kSliceBytes),
      arrived_(slices_) {}

bool SliceJob::is_over(std::uint64_t word) const noexcept {
  return (word & kRunningMask) == 0 && ((word & kStopped) != 0 || (word & kNextMask) >= slices_);
}

std::optional<std::uint64_t> SliceJob::claim() noexcept {
  std::uint64_t word = word_.load();
  do {
    if ((word & kStopped) != 0 || (word & kNextMask) >= slices_) return std::nullopt;
  } while (!word_.compare_exchange_weak(word, word + kOneRunning + 1));
  return word & kNextMask;
}

void SliceJob::run(std::uint64_t slice) noexcept {
  const StreamRange range = range_of(slice);
  if (const auto failed = copier_->copy(range)) {
    fail(*failed);
  } else {
    arrived_[slice].store(1, std::memory_order_relaxed);  // ordered by word_ below
    moved_.fetch_add(range.end - range.begin, std::memory_order_relaxed);
  }
  const std::uint64_t now = word_.fetch_sub(kOneRunning) - kOneRunning;
  // The owner may drop its transfer from here on; this object is kept by the queue until run() returns.
  if (is_over(now)) waker_.ring();
}

void SliceJob::stop() noexcept {
  word_.fetch_or(kStopped);
}

bool SliceJob::over() const noexcept {
  return is_over(word_.load());
}

std::uint64_t SliceJob::moved_bytes() const noexcept {
  return moved_.load(std::memory_order_relaxed);
}

void SliceJob::fail(const SliceFailure& failure) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = failure;  // later ones are echoes of the first
  }
  stop();
}

std::optional<SliceFailure> SliceJob::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

StreamRange SliceJob::range_of(std::uint64_t slice) const noexcept {
  const std::uint64_t begin = slice * kSliceBytes;
  return {begin, std::min(begin + kSliceBytes, copier_->total_bytes())};
}

std::vector<StreamRange> SliceJob::missing() const {
  std::vector<StreamRange> ranges;
  for (std::uint64_t slice = 0; slice < slices_; ++slice) {
    if (arrived_[slice].load(std::memory_order_relaxed) != 0) continue;
    const StreamRange range = range_of(slice);
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  return ranges;
}

SlicedTransfer::SlicedTransfer(std::unique_ptr<const SliceCopier> copier, CopyThreads& threads, const Waker& waker)
    : threads_(threads), job_(std::make_shared<SliceJob>(std::move(copier), waker)) {}

SlicedTransfer::~SlicedTransfer() {
  job_->stop();
}

void SlicedTransfer::start() noexcept {
  const std::int64_t before = now_ns();
  if (job_->total_bytes() <= kInlineBytes) {
    // Waking a copy thread, and being woken by it, takes longer than this.
    while (const auto slice = job_->claim()) job_->run(*slice);
  }
  submit();
  post_ns_ = static_cast<std::uint64_t>(now_ns() - before);
}

void SlicedTransfer::submit() noexcept {
  if (!submitted_ && !job_->over()) submitted_ = threads_.submit(job_);
}

bool SlicedTransfer::advance() noexcept {
  submit();  // again, if the queue was full
  const std::uint64_t moved = job_->moved_bytes();
  return std::exchange(seen_bytes_, moved) != moved;
}

void SlicedTransfer::cancel() noexcept {
  if (drained()) return;
  cancelled_ = true;
  job_->stop();
}

bool SlicedTransfer::drained() const noexcept {
  return job_->over();
}

std::uint64_t SlicedTransfer::moved_bytes() const noexcept {
  return job_->moved_bytes();
}

std::optional<Failure> SlicedTransfer::failure() const {
  if (const auto failed = job_->failure()) {
    std::string message = failed->cause;
    if (failed->error_number != 0) message += std::string(": ") + std::strerror(failed->error_number);
    return Failure{failed->code, std::move(message)};
  }
  if (cancelled_ && !job_->missing().empty())
    return Failure{Code::cancelled, "the copy was stopped before all of it was done"};
  return std::nullopt;
}

std::vector<StreamRange> SlicedTransfer::missing() const {
  return job_->missing();
}

}  // namespace kvlink::transport
