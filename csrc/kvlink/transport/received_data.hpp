// The bytes of one message: lent by the transport until they have been scattered, or shown for the length of a call.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace kvlink::transport {

/// Move-only. Gives its bytes back to the transport when destroyed, on whatever thread that is.
class ReceivedData {
 public:
  /// Who lent the bytes. `release` may be called from any thread.
  class Owner {
   public:
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    virtual ~Owner() = default;
    virtual void release(const void* data) noexcept = 0;
  };

  ReceivedData() = default;
  ReceivedData(std::shared_ptr<Owner> owner, std::span<const std::byte> bytes) noexcept
      : owner_(std::move(owner)), bytes_(bytes) {}
  /// Bytes that nobody lends: they lie where the transport received them, and only until the callback returns.
  [[nodiscard]] static ReceivedData shown(std::span<const std::byte> bytes) noexcept { return {nullptr, bytes}; }

  ReceivedData(ReceivedData&& other) noexcept
      : owner_(std::move(other.owner_)), bytes_(std::exchange(other.bytes_, {})) {}
  ReceivedData& operator=(ReceivedData&& other) noexcept {
    const ReceivedData old(std::move(*this));
    owner_ = std::move(other.owner_);
    bytes_ = std::exchange(other.bytes_, {});
    return *this;
  }
  ~ReceivedData() {
    if (owner_) owner_->release(bytes_.data());
  }

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  /// Whether the bytes may be kept after the callback has returned.
  [[nodiscard]] bool lent() const noexcept { return owner_ != nullptr; }

 private:
  std::shared_ptr<Owner> owner_;
  std::span<const std::byte> bytes_;
};

}  // namespace kvlink::transport
