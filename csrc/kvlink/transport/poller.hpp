// Sleeping until one of several descriptors has something to say.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvlink::transport {

/// Owns one epoll descriptor. Used by the progress thread only.
class Poller {
 public:
  struct Ready {
    std::uint64_t token{};
    bool readable{};  // also set on error and hang-up: reading tells which
    bool writable{};
  };

  Poller();  // throws Error(out_of_memory) when no descriptor is to be had
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  /// Watches `fd` for input. `token` comes back with its events; the descriptor stays the caller's.
  void watch(int fd, std::uint64_t token);
  /// Turns the wish to be told of writability on or off.
  void want_writable(int fd, std::uint64_t token, bool wanted) noexcept;
  /// To be called before the descriptor is closed.
  void forget(int fd) noexcept;

  /// Waits at most `timeout_ns` (0: only looks) and returns what is ready; valid until the next call.
  [[nodiscard]] std::span<const Ready> wait(std::int64_t timeout_ns) noexcept;

 private:
  int fd_;
  std::vector<Ready> ready_;
};

}  // namespace kvlink::transport
