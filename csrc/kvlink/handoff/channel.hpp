// One authenticated control connection: whole frames in, whole frames out, never blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvlink/handoff/messages.hpp"
#include "kvlink/transport/socket_fd.hpp"

namespace kvlink::handoff {

/// Owns the socket. Progress thread only.
class Channel {
 public:
  /// Takes `fd` over and makes it non-blocking. `dialect`: of all frames, both ways.
  Channel(int fd, std::uint8_t dialect) noexcept;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_.value(); }

  /// Whole frames are appended here; `flush` writes the dialect into them and sends them.
  [[nodiscard]] std::vector<std::byte>& outbox() noexcept { return outbox_; }
  /// Sends what the socket takes. False once the peer is gone or reads so slowly that the outbox is over its limit.
  [[nodiscard]] bool flush() noexcept;
  [[nodiscard]] bool wants_writable() const noexcept { return sent_ < outbox_.size(); }

  /// Reads what is there and hands each whole frame to `visit(const Header&, span body)`.
  /// False once the peer is gone, or sent what is no frame; `why()` tells.
  template <class Visit>
  [[nodiscard]] bool receive(Visit&& visit) {
    const bool alive = fill();
    while (const auto frame = next_frame()) visit(frame->header, frame->body);
    compact();
    return alive && !broken_;
  }
  [[nodiscard]] const std::string& why() const noexcept { return why_; }
  /// Whether the peer broke the protocol, and did not only go away.
  [[nodiscard]] bool broken() const noexcept { return broken_; }

 private:
  struct Frame {
    Header header;
    std::span<const std::byte> body;
  };

  [[nodiscard]] bool fill() noexcept;
  void write_dialect() noexcept;
  [[nodiscard]] std::optional<Frame> next_frame() noexcept;
  void compact() noexcept;

  transport::SocketFd fd_;
  const std::uint8_t dialect_;
  bool broken_{false};
  std::string why_;
  std::vector<std::byte> inbox_;
  std::size_t parsed_{0};
  std::vector<std::byte> outbox_;
  std::size_t sent_{0};
  std::size_t dialect_written_{0};  // in all frames up to here
};

}  // namespace kvlink::handoff
