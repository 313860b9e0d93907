// Which ids were offered here and have ended: exact, in bounded memory, and where it must forget it refuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>

#include "kvlink/ids.hpp"

namespace kvlink::handoff {

/// The sequences of one epoch that have ended: all below a watermark, and a bitmap of those above it.
///
/// The watermark rises over sequences that have all ended, and with the newest that has: one that lies more than
/// `kBitmap` behind it counts as ended, offered or not. So one that did end never counts as new again.
class EndedSequences {
 public:
  static constexpr std::uint64_t kBitmap = std::uint64_t{1} << 20U;  // 128 KiB

  void add(std::uint64_t sequence);
  [[nodiscard]] bool contains(std::uint64_t sequence) const noexcept;

 private:
  static constexpr std::uint64_t kWordBits = 64;

  std::uint64_t watermark_{0};          // a multiple of kWordBits; all below have ended
  std::deque<std::uint64_t> words_{1};  // from the watermark on. Sequence 0 does not exist
};

/// What is known about an id that no live offer has.
enum class Retirement : std::uint8_t {
  none,            // it was never offered here
  ended,           // it was, or is so old that it counts as such
  mint_forgotten,  // its mint was forgotten in favour of others that were used later
  too_many_mints,  // nothing can be said of a mint that was not used here before
};
/// For messages: what it means for whoever names the id.
[[nodiscard]] const char* why_retired(Retirement retirement) noexcept;

/// Ids of this node's own epoch and of mints. Progress thread only.
///
/// The `kMints` mints whose ids were offered, or ended, last are remembered id by id. Of one that is forgotten only the
/// epoch is kept, and all its ids count as ended. Once `kForgotten` have been forgotten, no further mint is taken,
/// until the node starts a new life.
class RetiredIds {
 public:
  static constexpr std::size_t kMints = 64;          // 8 MiB of bitmaps at most
  static constexpr std::size_t kForgotten = 65'536;  // about 4 MiB

  /// `own` is read at each call, and outlives this.
  explicit RetiredIds(const Epoch& own) noexcept : own_(own) {}

  /// An id of the epoch is being offered.
  void use(const Epoch& epoch);
  void add(const HandoffId& id);
  [[nodiscard]] Retirement look_up(const HandoffId& id) const noexcept;

 private:
  struct Mint {
    EndedSequences ended;
    std::uint64_t last_use{};
  };
  [[nodiscard]] EndedSequences* sequences_of(const Epoch& epoch);

  const Epoch& own_;
  EndedSequences own_ended_;
  std::map<Epoch, Mint> mints_;
  std::set<Epoch> forgotten_;
  std::uint64_t uses_{0};
};

}  // namespace kvlink::handoff
