#include "kvlink/transport/socket_fd.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <utility>

namespace kvlink::transport {
namespace {

/// Never destroyed: a process may fork while it ends.
std::mutex& all_mutex() {
  static std::mutex& made = *new std::mutex;
  return made;
}

SocketFd* all = nullptr;  // guarded by all_mutex()

}  // namespace

void SocketFd::close_all_in_child() noexcept {
  for (SocketFd* each = all; each != nullptr; each = each->next_) ::close(std::exchange(each->fd_, -1));
  all_mutex().unlock();
}

SocketFd::SocketFd(int fd) noexcept : fd_(fd) {
  // Without memory for the handlers children keep their copies, as they would without this class.
  [[maybe_unused]] static const int registered =
      ::pthread_atfork([] { all_mutex().lock(); }, [] { all_mutex().unlock(); }, [] { close_all_in_child(); });
  const std::lock_guard lock(all_mutex());
  next_ = all;
  if (all != nullptr) all->previous_ = this;
  all = this;
}

SocketFd::~SocketFd() {
  {
    const std::lock_guard lock(all_mutex());
    if (next_ != nullptr) next_->previous_ = previous_;
    (previous_ != nullptr ? previous_->next_ : all) = next_;
  }
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace kvlink::transport
