// Little-endian numbers in and out of control frames. Reading checks every length before it touches a byte.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlink::handoff {

static_assert(std::endian::native == std::endian::little, "frames are written as the host lays numbers out");

/// Appends to a byte vector that the caller owns.
class FrameWriter {
 public:
  explicit FrameWriter(std::vector<std::byte>& out) : out_(out) {}

  template <std::integral Number>
  void number(Number value) {
    bytes(std::as_bytes(std::span(&value, 1)));
  }
  void bytes(std::span<const std::byte> data) { out_.insert(out_.end(), data.begin(), data.end()); }
  void text(std::string_view data) { bytes(std::as_bytes(std::span(data.data(), data.size()))); }

 private:
  std::vector<std::byte>& out_;
};

/// Reads from bytes of a peer. After a read past the end `ok()` is false and every value is zero or empty.
class FrameReader {
 public:
  explicit FrameReader(std::span<const std::byte> data) : rest_(data) {}

  template <std::integral Number>
  [[nodiscard]] Number number() noexcept {
    Number value{};
    const auto data = bytes(sizeof value);
    if (ok_) std::memcpy(&value, data.data(), sizeof value);
    return value;
  }
  [[nodiscard]] std::span<const std::byte> bytes(std::size_t count) noexcept {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto data = rest_.first(count);
    rest_ = rest_.subspan(count);
    return data;
  }
  [[nodiscard]] std::string text(std::size_t count) {
    const auto data = bytes(count);
    return ok_ ? std::string(reinterpret_cast<const char*>(data.data()), data.size()) : std::string();
  }
  [[nodiscard]] std::size_t remaining() const noexcept { return ok_ ? rest_.size() : 0; }
  /// Everything was there and nothing is left over.
  [[nodiscard]] bool complete() const noexcept { return ok_ && rest_.empty(); }
  [[nodiscard]] bool ok() const noexcept { return ok_; }

 private:
  std::span<const std::byte> rest_;
  bool ok_{true};
};

}  // namespace kvlink::handoff
