// Ownership of one connected socket, which no forked child keeps open.
#pragma once

namespace kvlink::transport {

/// Closes its descriptor when it goes, and at once in a child that is forked. A child that kept a copy would keep the
/// connection alive when its parent dies, and the peer would never learn of that death.
class SocketFd {
 public:
  explicit SocketFd(int fd) noexcept;
  ~SocketFd();
  SocketFd(const SocketFd&) = delete;
  SocketFd& operator=(const SocketFd&) = delete;

  [[nodiscard]] int value() const noexcept { return fd_; }

 private:
  static void close_all_in_child() noexcept;

  int fd_;
  // All of this process, so that a child finds them. Guarded by a lock that a fork takes too.
  SocketFd* previous_{nullptr};
  SocketFd* next_;
};

}  // namespace kvlink::transport
