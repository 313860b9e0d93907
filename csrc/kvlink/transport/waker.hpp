// A bell that other threads ring to wake the progress thread out of its sleep.
#pragma once

namespace kvlink::transport {

/// Owns one eventfd. `ring` may be called from any thread, allocates nothing and never blocks.
class Waker {
 public:
  Waker();  // throws Error(out_of_memory) when no descriptor is to be had
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  void ring() const noexcept;
  /// Resets the bell. Called by whoever was woken, before it looks for work.
  void clear() const noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace kvlink::transport
