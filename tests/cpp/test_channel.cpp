// A control connection keeps no more memory than what is on its way, however its peer reads.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/channel.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

constexpr AttemptId kAttempt{.handoff = {.epoch = {}, .sequence = 1}, .attempt = 1};

struct Connection {
  Connection() {
    std::array<int, 2> ends{};
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    channel = std::make_unique<Channel>(ends[0]);
    peer = ends[1];
  }
  ~Connection() { ::close(peer); }

  std::size_t read(std::size_t most) {
    std::vector<std::byte> taken(most);
    const auto count = ::recv(peer, taken.data(), taken.size(), MSG_DONTWAIT);
    return count > 0 ? static_cast<std::size_t>(count) : 0;
  }

  std::unique_ptr<Channel> channel;
  int peer{-1};
};

std::vector<std::byte> frame(std::size_t body_bytes) {
  std::vector<std::byte> out;
  write_grant(out, kAttempt,
              Grant{.remaining_ms = 1, .num_tokens = 1, .payload = std::vector<std::byte>(body_bytes), .blocks = {}});
  return out;
}

void a_peer_that_reads_slowly_costs_what_it_has_not_read() {
  Connection connection;
  auto& outbox = connection.channel->outbox();
  const auto message = frame(100'000);
  std::size_t written = 0;
  std::size_t taken = 0;
  for (int round = 0; round < 2000; ++round) {  // 200 MB pass, and the outbox is never empty
    outbox.insert(outbox.end(), message.begin(), message.end());
    written += message.size();
    CHECK(connection.channel->flush());
    while (written - taken > 3 * message.size()) {
      const std::size_t count = connection.read(message.size());
      CHECK(count > 0);
      taken += count;
      CHECK(connection.channel->flush());
    }
    CHECK(outbox.size() <= 8 * message.size());
  }
}

void a_peer_that_does_not_read_is_given_up_at_the_limit() {
  Connection connection;
  const auto message = frame(1U << 20U);
  std::size_t written = 0;
  while (connection.channel->flush()) {
    auto& outbox = connection.channel->outbox();
    outbox.insert(outbox.end(), message.begin(), message.end());
    written += message.size();
    CHECK(written < (80U << 20U));
  }
  CHECK(connection.channel->why() == "the peer does not read its control messages");
}

void a_large_message_leaves_no_large_buffer() {
  Connection connection;
  const auto message = frame(4U << 20U);
  auto& outbox = connection.channel->outbox();
  outbox = message;
  std::size_t taken = 0;
  while (taken < message.size()) {
    CHECK(connection.channel->flush());
    taken += connection.read(1U << 20U);
  }
  CHECK(connection.channel->flush());
  CHECK(outbox.capacity() <= (64U << 10U));
  CHECK(!connection.channel->wants_writable());
}

}  // namespace

int main() {
  return kvlink::test::run(
      {{"a peer that reads slowly costs what it has not read", a_peer_that_reads_slowly_costs_what_it_has_not_read},
       {"a peer that does not read is given up at the limit", a_peer_that_does_not_read_is_given_up_at_the_limit},
       {"a large message leaves no large buffer", a_large_message_leaves_no_large_buffer}});
}
