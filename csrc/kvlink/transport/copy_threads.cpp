#include "kvlink/transport/copy_threads.hpp"

#include <pthread.h>

#include <csignal>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "kvlink/error.hpp"
#include "kvlink/signals.hpp"

namespace kvlink::transport {
namespace {

/// Blocks signals while it lives, so that threads started meanwhile inherit the mask: signals go to threads that Python
/// or the engine prepared for them.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    const sigset_t blocked = signals_of_others();
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

/// A job of one piece.
class OneCall final : public CopyJob {
 public:
  explicit OneCall(std::function<void()> work) : work_(std::move(work)) {}

  std::optional<std::uint64_t> claim() noexcept override {
    if (std::exchange(claimed_, true)) return std::nullopt;
    return 0;
  }
  void run(std::uint64_t) noexcept override { work_(); }

 private:
  std::function<void()> work_;
  bool claimed_{false};  // guarded by the queue's lock
};

}  // namespace

CopyThreads::CopyThreads(unsigned threads) : count_(threads) {
  if (threads == 0) throw Error(Code::invalid_argument, "start copy threads: at least one is needed");
  const SignalsBlocked blocked;
  try {
    workers_.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) workers_.emplace_back([this] { serve(); });
  } catch (const std::system_error& refused) {
    stop_and_join();
    throw Error(Code::out_of_memory, "start " + std::to_string(threads) + " copy threads: " + refused.what());
  }
}

CopyThreads::~CopyThreads() {
  stop_and_join();
}

bool CopyThreads::submit(std::shared_ptr<CopyJob> job) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (jobs_.size() >= kMaxJobs) return false;
    jobs_.push_back(std::move(job));
  } catch (const std::bad_alloc&) {
    return false;
  }
  // All of them: the job may have pieces for every thread.
  work_.notify_all();
  return true;
}

bool CopyThreads::submit_once(const std::function<void()>& work) noexcept {
  try {
    auto job = std::make_shared<OneCall>(work);
    const std::lock_guard lock(mutex_);
    if (jobs_.size() >= kMaxJobs) return false;
    jobs_.push_back(std::move(job));
  } catch (const std::bad_alloc&) {
    return false;
  }
  work_.notify_one();
  return true;
}

void CopyThreads::serve() noexcept {
  ::pthread_setname_np(::pthread_self(), "kvlink-copy");
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    std::shared_ptr<CopyJob> job = jobs_.front();
    const auto piece = job->claim();
    if (piece) {
      jobs_.splice(jobs_.end(), jobs_, jobs_.begin());  // to the back: every job gets its turn
    } else {
      jobs_.pop_front();
    }
    lock.unlock();
    if (piece) job->run(*piece);
    job.reset();  // outside the lock: this may be the last reference, and free a whole transfer
    lock.lock();
  }
}

void CopyThreads::stop_and_join() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

}  // namespace kvlink::transport
