// The threads that move bulk bytes, so that the progress thread never does.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace kvlink::transport {

/// Work made of pieces that may run in any order and at the same time.
class CopyJob {
 public:
  CopyJob() = default;
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;
  virtual ~CopyJob() = default;

  /// Takes the next piece, or nothing when the job is exhausted or stopped. Called under the queue's lock, hence short.
  [[nodiscard]] virtual std::optional<std::uint64_t> claim() noexcept = 0;

  /// Runs a claimed piece, on a copy thread. A few milliseconds at most: this is the grain of cancelling and of
  /// fairness.
  virtual void run(std::uint64_t piece) noexcept = 0;
};

/// A fixed set of threads that take pieces from all jobs in turn, so that a large handoff does not hold up a small one.
/// The threads block every signal. Whatever the jobs refer to (a Waker) must outlive this object.
class CopyThreads {
 public:
  /// A transfer is one job, and a node has a limit of handoffs below this.
  static constexpr std::size_t kMaxJobs = 16384;

  /// Throws Error(invalid_argument) for no threads, Error(out_of_memory) when the system refuses one.
  explicit CopyThreads(unsigned threads);
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;
  /// Joins. Pieces that no thread has claimed never run; jobs are dropped.
  ~CopyThreads();

  /// Queues a job and returns at once. False when the queue is full (or memory is): try again on a later turn.
  [[nodiscard]] bool submit(std::shared_ptr<CopyJob> job) noexcept;

  /// Queues one call of a copy of `work`, which must not throw. A call that never ran is destroyed with this object.
  [[nodiscard]] bool submit_once(const std::function<void()>& work) noexcept;

  [[nodiscard]] unsigned threads() const noexcept { return count_; }

 private:
  void serve() noexcept;
  void stop_and_join() noexcept;

  const unsigned count_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::list<std::shared_ptr<CopyJob>> jobs_;  // guarded by mutex_; each live job stands here once
  bool stopping_{false};                      // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace kvlink::transport
