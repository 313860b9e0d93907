#include "kvlink/transport/poller.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "kvlink/error.hpp"

namespace kvlink::transport {
namespace {

constexpr std::size_t kEventsPerWait = 64;
constexpr std::int64_t kNanosecondsPerMillisecond = 1'000'000;
constexpr std::int64_t kLongestSleepMs = 60'000;

}  // namespace

Poller::Poller() : fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (fd_ < 0) throw Error(Code::out_of_memory, std::string("open an epoll descriptor: ") + std::strerror(errno));
  ready_.reserve(kEventsPerWait);
}

Poller::~Poller() {
  ::close(fd_);
}

void Poller::watch(int fd, std::uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  if (::epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(Code::out_of_memory, std::string("watch a descriptor: ") + std::strerror(errno));
  }
}

void Poller::want_writable(int fd, std::uint64_t token, bool wanted) noexcept {
  epoll_event event{};
  event.events = wanted ? (EPOLLIN | EPOLLOUT) : EPOLLIN;
  event.data.u64 = token;
  ::epoll_ctl(fd_, EPOLL_CTL_MOD, fd, &event);
}

void Poller::forget(int fd) noexcept {
  ::epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr);
}

std::span<const Poller::Ready> Poller::wait(std::int64_t timeout_ns) noexcept {
  // Rounded up: waking a moment after a deadline is right, spinning until it is not.
  const std::int64_t rounded = (timeout_ns + kNanosecondsPerMillisecond - 1) / kNanosecondsPerMillisecond;
  const int timeout_ms = static_cast<int>(std::clamp<std::int64_t>(rounded, 0, kLongestSleepMs));
  std::array<epoll_event, kEventsPerWait> events;
  const int count = ::epoll_wait(fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  ready_.clear();
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    ready_.push_back({.token = event.data.u64,
                      .readable = (event.events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0,
                      .writable = (event.events & EPOLLOUT) != 0});
  }
  return ready_;
}

}  // namespace kvlink::transport
