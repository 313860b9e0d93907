#include "kvlink/transport/alarm.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "kvlink/clock.hpp"
#include "kvlink/error.hpp"
#include "kvlink/signals.hpp"

namespace kvlink::transport {

Alarm::Alarm(const Waker& waker) : waker_(waker) {
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw Error(Code::out_of_memory, std::string("start the alarm's thread: ") + error.what());
  }
}

Alarm::~Alarm() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Alarm::ring_at(std::int64_t when_ns) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (when_ns >= next_ns_) return;
    next_ns_ = when_ns;
  }
  changed_.notify_one();
}

void Alarm::serve() noexcept {
  const sigset_t blocked = signals_of_others();
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  ::pthread_setname_np(::pthread_self(), "kvlink-alarm");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::int64_t left_ns = next_ns_ == kNever ? kNever : next_ns_ - now_ns();
    if (left_ns <= 0) {
      next_ns_ = kNever;
      waker_.ring();
      continue;
    }
    constexpr std::int64_t kLongestNs = 3600LL * 1000 * kNsPerMs;
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongestNs)));
  }
}

}  // namespace kvlink::transport
