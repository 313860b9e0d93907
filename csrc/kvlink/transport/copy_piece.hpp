// One bounded copy on a copy thread, which the progress thread may still call off.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::transport {

/// A CopyJob of one piece whose fate can be asked for. `waker` outlives it; rings when the copy is done.
class CopyPiece : public CopyJob {
 public:
  explicit CopyPiece(const Waker& waker) : waker_(waker) {}

  std::optional<std::uint64_t> claim() noexcept final {
    auto queued = Phase::queued;
    if (!phase_.compare_exchange_strong(queued, Phase::running)) return std::nullopt;
    return 0;
  }

  void run(std::uint64_t /*piece*/) noexcept final {
    copy();
    // Release (by seq_cst) pairs with the load in `copied`: whoever sees it sees the bytes.
    phase_.store(Phase::copied);
    waker_.ring();
  }

  /// Calls the copy off unless a thread has begun it. Idempotent.
  void call_off() noexcept {
    auto queued = Phase::queued;
    phase_.compare_exchange_strong(queued, Phase::called_off);
  }

  [[nodiscard]] bool copied() const noexcept { return phase_.load() == Phase::copied; }
  /// Whether no thread works on it and none will.
  [[nodiscard]] bool settled() const noexcept {
    const Phase phase = phase_.load();
    return phase == Phase::copied || phase == Phase::called_off;
  }

 protected:
  virtual void copy() noexcept = 0;

 private:
  enum class Phase : std::uint8_t { queued, running, copied, called_off };
  const Waker& waker_;
  std::atomic<Phase> phase_{Phase::queued};
};

}  // namespace kvlink::transport
