#include "kvlink/handoff/channel.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace kvlink::handoff {
namespace {

constexpr std::size_t kReadChunk = 64U << 10U;
/// One turn reads at most this much, so that one talkative peer does not starve the others.
constexpr std::size_t kReadPerTurn = 1U << 20U;
/// A peer that lets this much pile up does not read any more.
constexpr std::size_t kOutboxLimit = 64U << 20U;
/// What a buffer keeps for the next message. A large one is rare, and a node has hundreds of peers.
constexpr std::size_t kKeptBytes = 64U << 10U;

/// Takes the first `count` bytes off.
void drop_front(std::vector<std::byte>& buffer, std::size_t count) noexcept {
  if (count == buffer.size() && buffer.capacity() > kKeptBytes) {
    std::vector<std::byte>().swap(buffer);
  } else {
    buffer.erase(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

}  // namespace

Channel::Channel(int fd, std::uint8_t dialect) noexcept : fd_(fd), dialect_(dialect) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

void Channel::write_dialect() noexcept {
  while (dialect_written_ < outbox_.size()) {
    std::uint32_t body_bytes{};
    std::memcpy(&body_bytes, outbox_.data() + dialect_written_, sizeof body_bytes);
    outbox_[dialect_written_ + kDialectOffset] = std::byte{dialect_};
    dialect_written_ += kHeaderBytes + body_bytes;
  }
}

bool Channel::flush() noexcept {
  write_dialect();
  while (sent_ < outbox_.size()) {
    const auto count = ::send(fd_.value(), outbox_.data() + sent_, outbox_.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count <= 0) {
      why_ = std::string("send: ") + std::strerror(errno);
      return false;
    }
    sent_ += static_cast<std::size_t>(count);
  }
  // The second for a peer that reads slowly, and so never lets it get empty. Half at a time, so a byte is moved once.
  if (sent_ == outbox_.size() || (sent_ > kKeptBytes && sent_ >= outbox_.size() / 2)) {
    drop_front(outbox_, sent_);
    dialect_written_ -= sent_;
    sent_ = 0;
  }
  if (outbox_.size() - sent_ > kOutboxLimit) {
    why_ = "the peer does not read its control messages";
    return false;
  }
  return true;
}

bool Channel::fill() noexcept {
  std::array<std::byte, kReadChunk> chunk;
  for (std::size_t total = 0; total < kReadPerTurn;) {
    const auto count = ::recv(fd_.value(), chunk.data(), chunk.size(), 0);
    if (count > 0) {
      inbox_.insert(inbox_.end(), chunk.begin(), chunk.begin() + count);
      total += static_cast<std::size_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    why_ = count == 0 ? "connection closed by the peer" : std::string("connection lost: ") + std::strerror(errno);
    return false;
  }
  return true;
}

std::optional<Channel::Frame> Channel::next_frame() noexcept {
  const auto rest = std::span<const std::byte>(inbox_).subspan(parsed_);
  if (broken_ || rest.size() < kHeaderBytes) return std::nullopt;
  const auto header = parse_header(rest.first<kHeaderBytes>());
  if (!header || header->dialect != dialect_) {
    broken_ = true;
    why_ = header ? "the peer sent a control frame of dialect " + std::to_string(header->dialect) +
                        ", and the handshake chose " + std::to_string(dialect_)
                  : "the peer sent bytes that are no control frame";
    return std::nullopt;
  }
  if (rest.size() - kHeaderBytes < header->body_bytes) return std::nullopt;
  parsed_ += kHeaderBytes + header->body_bytes;
  return Frame{*header, rest.subspan(kHeaderBytes, header->body_bytes)};
}

void Channel::compact() noexcept {
  drop_front(inbox_, parsed_);
  parsed_ = 0;
}

}  // namespace kvlink::handoff
