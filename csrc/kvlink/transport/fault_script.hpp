// Faults by script and seed, for tests. What every faulty lane shares: the script, its draws, its alarm, its counts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "kvlink/transport/alarm.hpp"

namespace kvlink::transport {

/// What goes wrong. A piece is a block pair, or a chunk on the staged lane.
struct FaultScript {
  std::uint64_t seed{};
  double delay_ms{};   // each piece waits up to so long, in order unless reordered
  double drop{};       // share of the pieces that never arrive
  double duplicate{};  // share of the pieces that arrive a second time, later
  double corrupt{};    // share of the pieces in which a bit turns over on the way
  bool reorder{};
  std::optional<std::uint64_t> fail_after_bytes;  // the lane fails once so many are on their way
  std::uint32_t no_resource{};                    // how often posting a piece is refused first
  /// A cancel stops nothing: what was posted still lands. Errors are told only after `error_after_ms`.
  bool like_rc{};
  double error_after_ms{};
};

/// What came of it. Shared with whoever asks; outlives the node.
struct FaultCounts {
  std::atomic<std::uint64_t> transfers{0};
  std::atomic<std::uint64_t> pieces{0};
  std::atomic<std::uint64_t> dropped{0};
  std::atomic<std::uint64_t> duplicated{0};
  std::atomic<std::uint64_t> corrupted{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::uint64_t> late{0};    // pieces that were posted after the transfer was cancelled
  std::atomic<std::uint64_t> midway{0};  // transfers that were cancelled with some of their bytes here and some not
};

/// The faults of one transfer: the same for the same seed, transfer and piece, whatever the timing.
class FaultDraws {
 public:
  FaultDraws(std::uint64_t seed, std::uint64_t transfer) noexcept : key_(mix(seed ^ mix(transfer))) {}

  enum class Purpose : std::uint64_t { drop = 1, duplicate, delay, again, order, corrupt, where };

  /// A number in [0, 1).
  [[nodiscard]] double draw(std::uint64_t piece, Purpose purpose) const noexcept {
    const std::uint64_t bits = mix(key_ ^ mix(piece * 8 + static_cast<std::uint64_t>(purpose)));
    return static_cast<double>(bits >> 11U) * 0x1p-53;
  }

 private:
  /// SplitMix64.
  [[nodiscard]] static std::uint64_t mix(std::uint64_t bits) noexcept {
    bits += 0x9e3779b97f4a7c15U;
    bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebU;
    return bits ^ (bits >> 31U);
  }

  std::uint64_t key_;
};

/// One script at work in one node. Progress thread, apart from the counts.
class Faults {
 public:
  /// `waker` outlives this object. Throws Error(out_of_memory) when there is no thread for the alarm.
  Faults(const FaultScript& script, std::shared_ptr<FaultCounts> counts, const Waker& waker)
      : script_(script), counts_(std::move(counts)), alarm_(waker) {}

  [[nodiscard]] const FaultScript& script() const noexcept { return script_; }
  [[nodiscard]] FaultCounts& counts() const noexcept { return *counts_; }
  [[nodiscard]] Alarm& alarm() noexcept { return alarm_; }
  /// For the next transfer.
  [[nodiscard]] FaultDraws draws() noexcept { return {script_.seed, counts_->transfers.fetch_add(1)}; }

 private:
  const FaultScript script_;
  const std::shared_ptr<FaultCounts> counts_;
  Alarm alarm_;
};

}  // namespace kvlink::transport
