// Two processes that meet over a socket pair, each with one UCX worker, for tests of the UCX lanes.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvlink/clock.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/ucx/context.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"
#include "kvlink/transport/ucx/worker.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::test {

/// Every wait of these tests ends by then; far above what anything takes.
inline constexpr std::int64_t kLimitNs = 20'000'000'000;

inline std::string library_path;  // NOLINT: set once by main, before anything runs

/// One end of the socket pair. Blocking, with a receive timeout.
class Link {
 public:
  explicit Link(int fd) : fd_(fd) {
    const timeval limit{.tv_sec = kLimitNs / 1'000'000'000, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  void send(std::span<const std::byte> bytes) const {
    const std::uint64_t length = bytes.size();
    const bool sent = ::send(fd_, &length, sizeof length, MSG_NOSIGNAL) == sizeof length &&
                      ::send(fd_, bytes.data(), length, MSG_NOSIGNAL) == static_cast<ssize_t>(length);
    CHECK(sent || errno == EPIPE || errno == ECONNRESET);  // A peer may be killed at any moment.
  }
  [[nodiscard]] std::vector<std::byte> receive() const {
    std::uint64_t length = 0;
    CHECK(::recv(fd_, &length, sizeof length, MSG_WAITALL) == sizeof length);
    std::vector<std::byte> bytes(length);
    CHECK(::recv(fd_, bytes.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length));
    return bytes;
  }
  void send_number(std::uint64_t number) const { send(std::as_bytes(std::span(&number, 1))); }
  [[nodiscard]] std::uint64_t receive_number() const {
    std::uint64_t number = 0;
    const auto bytes = receive();
    std::memcpy(&number, bytes.data(), sizeof number);
    return number;
  }
  /// Whether a message, or the end of the peer, can be read.
  [[nodiscard]] bool readable() const {
    pollfd wait{.fd = fd_, .events = POLLIN, .revents = 0};
    return ::poll(&wait, 1, 0) > 0;
  }
  [[nodiscard]] bool peer_gone() const {
    char byte = 0;
    return readable() && ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0;
  }
  /// Waits for the peer's end, whatever it still has to say.
  void discard_until_end() const {
    char bytes[256];
    while (::recv(fd_, bytes, sizeof bytes, 0) > 0) continue;
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

/// What one process of a pair owns. Members are in the order in which an engine would make them.
struct Party {
  using Settings = std::vector<std::pair<std::string, std::string>>;

  Party(const Link& to_peer, const Settings& settings, transport::ucx::FailureMode failure_mode, bool one_sided)
      : link(to_peer),
        mode(failure_mode),
        context(std::make_shared<transport::ucx::Context>(
            transport::ucx::Library::load(library_path),
            transport::ucx::ContextOptions{.settings = settings, .one_sided = one_sided})),
        worker(transport::ucx::Worker::create(context, router)) {}

  [[nodiscard]] std::shared_ptr<transport::ucx::Endpoint> connect(std::span<const std::byte> address) const {
    return std::make_shared<transport::ucx::Endpoint>(worker, address, mode, "the peer");
  }

  /// Progress until `done`, sleeping in between as the engine does. False when the time is up.
  bool run_until(const std::function<bool()>& done, const std::function<bool()>& advance) {
    const auto until = now_ns() + kLimitNs;
    while (!done()) {
      if (now_ns() > until) return false;
      const bool progressed = worker->progress() != 0;
      if (advance() || progressed) continue;
      if (!worker->arm()) continue;
      pollfd waits[] = {{.fd = worker->event_fd(), .events = POLLIN, .revents = 0},
                        {.fd = waker.fd(), .events = POLLIN, .revents = 0},
                        {.fd = link.fd(), .events = POLLIN, .revents = 0}};
      ::poll(waits, 3, 20);
      waker.clear();
    }
    return true;
  }

  Link link;
  transport::ucx::FailureMode mode;
  std::shared_ptr<transport::ucx::Context> context;
  std::shared_ptr<transport::ChunkRouter> router = std::make_shared<transport::ChunkRouter>();
  std::shared_ptr<transport::ucx::Worker> worker;
  transport::Waker waker;
  transport::CopyThreads copy_threads{1};
};

/// How a process of a pair must end.
enum class End { by_itself, killed };

/// Runs `source` and `target`, each in a process of its own that starts without threads and without UCX.
class TwoProcesses {
 public:
  using Role = std::function<void(const Link&)>;

  TwoProcesses(const Role& source, const Role& target) {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    source_ = start(source, ends[0], ends[1]);
    target_ = start(target, ends[1], ends[0]);
    ::close(ends[0]);
    ::close(ends[1]);
  }

  void expect(End source, End target) const {
    const auto until = now_ns() + 3 * kLimitNs;
    expect_end(target_, target, until);
    expect_end(source_, source, until);
  }

 private:
  static pid_t start(const Role& role, int mine, int others) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child != 0) return child;
    ::close(others);
    role(Link(mine));
    std::fflush(nullptr);
    std::exit(0);  // runs UCX's own exit handlers, as the end of a node's process does
  }

  static void expect_end(pid_t child, End end, std::int64_t until) {
    int status = 0;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (now_ns() > until) {
        ::kill(child, SIGKILL);
        CHECK(!"a process of the pair did not end");
      }
      ::poll(nullptr, 0, 5);
    }
    if (end == End::killed) CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    if (end == End::by_itself) CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }

  pid_t source_{};
  pid_t target_{};
};

}  // namespace kvlink::test
