#include "kvlink/transport/waker.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "kvlink/error.hpp"

namespace kvlink::transport {

Waker::Waker() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw Error(Code::out_of_memory, std::string("open an eventfd: ") + std::strerror(errno));
}

Waker::~Waker() {
  ::close(fd_);
}

void Waker::ring() const noexcept {
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full, so the sleeper is awake already.
  [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
}

void Waker::clear() const noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto read = ::read(fd_, &count, sizeof count);
}

}  // namespace kvlink::transport
