#include "kvlink/transport/socket_reference.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include "kvlink/error.hpp"

namespace kvlink::transport {

namespace {

/// As many vectors as one call takes. A receiver that asked for fewer would only call more often.
constexpr std::size_t vectors_a_call = IOV_MAX;

[[noreturn]] void fail(const char* operation, ssize_t moved) {
  const int cause = errno;
  if (moved == 0) throw Error(Code::peer_lost, std::string(operation) + ": the other side has closed the connection");
  if (cause == EAGAIN || cause == EWOULDBLOCK) {
    throw Error(Code::deadline_exceeded, std::string(operation) + ": nothing moved within the socket's timeout");
  }
  throw Error(Code::peer_lost, std::string(operation) + ": " + std::strerror(cause));
}

/// Moves all runs by `call(socket, vectors, count)`. `Byte` is const where they are only read.
template <class Byte, class Call>
void move_runs(const char* operation, std::span<Byte> pool, std::span<const std::uint64_t> offsets,
               std::uint64_t run_bytes, Call call) {
  std::array<iovec, vectors_a_call> vectors;
  std::size_t first = 0;         // the run that is under way
  std::uint64_t done_bytes = 0;  // of it
  while (first < offsets.size()) {
    const std::size_t count = std::min(vectors_a_call, offsets.size() - first);
    for (std::size_t index = 0; index < count; ++index) {
      const std::uint64_t done = index == 0 ? done_bytes : 0;
      // writev takes the address as one it could write to, and does not.
      auto* start = const_cast<std::byte*>(pool.data() + offsets[first + index] + done);
      vectors[index] = {.iov_base = start, .iov_len = run_bytes - done};
    }
    const ssize_t moved = call(vectors.data(), static_cast<int>(count));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) fail(operation, moved);
    const std::uint64_t reached = done_bytes + static_cast<std::uint64_t>(moved);
    first += reached / run_bytes;
    done_bytes = reached % run_bytes;
  }
}

}  // namespace

void check_runs_of_socket(std::span<const std::uint64_t> offsets, std::uint64_t run_bytes, std::size_t pool_bytes) {
  const auto outside = std::ranges::find_if(offsets, [&](std::uint64_t offset) {
    return run_bytes == 0 || run_bytes > pool_bytes || offset > pool_bytes - run_bytes;
  });
  if (outside == offsets.end()) return;
  throw Error(Code::invalid_argument, "move runs by a socket: the run of " + std::to_string(run_bytes) +
                                          " bytes at offset " + std::to_string(*outside) + " leaves the pool of " +
                                          std::to_string(pool_bytes) + " bytes");
}

void send_runs(int socket, std::span<const std::byte> pool, std::span<const std::uint64_t> offsets,
               std::uint64_t run_bytes) {
  move_runs("send runs by a socket", pool, offsets, run_bytes,
            [socket](const iovec* vectors, int count) { return ::writev(socket, vectors, count); });
}

void receive_runs(int socket, std::span<std::byte> pool, std::span<const std::uint64_t> offsets,
                  std::uint64_t run_bytes) {
  move_runs("receive runs by a socket", pool, offsets, run_bytes,
            [socket](const iovec* vectors, int count) { return ::readv(socket, vectors, count); });
}

}  // namespace kvlink::transport
