// A control connection keeps no more memory than what is on its way, however its peer reads, and speaks one dialect.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/channel.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

constexpr AttemptId kAttempt{.handoff = {.epoch = {}, .sequence = 1}, .attempt = 1};

struct Connection {
  explicit Connection(std::uint8_t dialect = kNewestDialect) {
    std::array<int, 2> ends{};
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    channel = std::make_unique<Channel>(ends[0], dialect);
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

void every_frame_is_of_the_dialect_that_was_agreed_on() {
  for (std::uint8_t dialect = 0; dialect <= kNewestDialect; ++dialect) {
    Connection connection(dialect);
    std::size_t expected = 0;
    for (int round = 0; round < 3; ++round) {  // more than one a flush, and one after what was sent
      write_empty(connection.channel->outbox(), Kind::valid, kAttempt);
      write_number(connection.channel->outbox(), Kind::credit, kAttempt, 7);
      CHECK(connection.channel->flush());
      write_renew(connection.channel->outbox(), std::vector<Renewal>(3));
      CHECK(connection.channel->flush());
      expected += 3;
    }
    std::vector<std::byte> sent(4096);
    sent.resize(static_cast<std::size_t>(::recv(connection.peer, sent.data(), sent.size(), MSG_DONTWAIT)));
    std::size_t frames = 0;
    for (auto rest = std::span<const std::byte>(sent); !rest.empty(); ++frames) {
      const auto header = parse_header(rest.first<kHeaderBytes>());
      CHECK(header && header->dialect == dialect);
      rest = rest.subspan(kHeaderBytes + header->body_bytes);
    }
    CHECK(frames == expected);
  }
}

void a_frame_of_another_dialect_breaks_the_protocol() {
  for (const int sent : {0, 1, 2, 255}) {
    for (std::uint8_t dialect = 0; dialect <= kNewestDialect; ++dialect) {
      Connection connection(dialect);
      std::vector<std::byte> message;
      write_empty(message, Kind::valid, kAttempt);
      message[kDialectOffset] = static_cast<std::byte>(sent);
      CHECK(::send(connection.peer, message.data(), message.size(), 0) == static_cast<ssize_t>(message.size()));
      std::size_t frames = 0;
      const bool alive = connection.channel->receive([&](const Header&, std::span<const std::byte>) { ++frames; });
      CHECK(alive == (sent == dialect));
      CHECK(connection.channel->broken() == !alive);
      CHECK(frames == (alive ? 1U : 0U));
      const std::string expected = "the peer sent a control frame of dialect " + std::to_string(sent) +
                                   ", and the handshake chose " + std::to_string(dialect);
      CHECK(alive || connection.channel->why() == expected);
    }
  }
}

}  // namespace

int main() {
  return kvlink::test::run(
      {{"a peer that reads slowly costs what it has not read", a_peer_that_reads_slowly_costs_what_it_has_not_read},
       {"a peer that does not read is given up at the limit", a_peer_that_does_not_read_is_given_up_at_the_limit},
       {"a large message leaves no large buffer", a_large_message_leaves_no_large_buffer},
       {"every frame is of the dialect that was agreed on", every_frame_is_of_the_dialect_that_was_agreed_on},
       {"a frame of another dialect breaks the protocol", a_frame_of_another_dialect_breaks_the_protocol}});
}
