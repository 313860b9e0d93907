// Rings a bell at a time that is asked for: how a test's faults let time pass without keeping the loop awake.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>

#include "kvlink/transport/waker.hpp"

namespace kvlink::transport {

class Alarm {
 public:
  /// `waker` outlives this object. Throws Error(out_of_memory) when the system refuses a thread.
  explicit Alarm(const Waker& waker);
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm();

  /// Rings at `when_ns` on kvlink's clock, or earlier. Any thread.
  void ring_at(std::int64_t when_ns) noexcept;

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  void serve() noexcept;

  const Waker& waker_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t next_ns_{kNever};  // guarded by mutex_
  bool stopping_{false};          // guarded by mutex_
  std::thread thread_;
};

}  // namespace kvlink::transport
