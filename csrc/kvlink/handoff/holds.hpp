// Which blocks live handoffs read or write: shared for reading, exclusive for writing, and in quarantine.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace kvlink::handoff {

/// One group of the cache as its owner counts it.
struct Group {
  std::string name;
  std::uint32_t num_blocks{};
  std::uint32_t block_tokens{};
  std::uint32_t window{};  // tokens that a sliding window attends to; 0: all of them
  bool slots{};            // a table lists whole slots of state, whatever the tokens
  std::uint32_t pool{};    // groups of one number draw on the same blocks
};

/// Block ids by group; `-1` is a hole and is never held.
using BlockTables = std::vector<std::vector<std::int32_t>>;

/// The part of each table that a handoff of tokens [first, end) touches: cut after the last token, holes for entries
/// in front of `first` or of a group's window. Slots stay whole. Throws Error(invalid_argument) for a table that is too
/// short.
[[nodiscard]] BlockTables touched(const BlockTables& tables, const std::vector<Group>& groups, std::uint64_t first,
                                  std::uint64_t end);

/// Thread-safe. The engine's allocator decides what a block holds; this only keeps readers and writers apart.
class Holds {
 public:
  explicit Holds(std::vector<Group> groups);

  [[nodiscard]] const std::vector<Group>& groups() const noexcept { return groups_; }

  /// Holds every block of `tables` or none. Throws Error(invalid_argument) for a block that is out of range or
  /// appears twice, Error(blocks_busy) for one that a live handoff writes.
  void acquire_shared(const BlockTables& tables);
  /// As above; Error(blocks_busy) also for a block that a live offer holds.
  void acquire_exclusive(const BlockTables& tables);
  void release_shared(const BlockTables& tables) noexcept;
  /// What is held exclusively stays so, but counts apart: its pull has its outcome, and may still write.
  void quarantine(const BlockTables& tables) noexcept;
  /// In quarantine or not.
  void release_exclusive(const BlockTables& tables) noexcept;

  /// Blocks; none counts twice.
  struct Count {
    std::uint64_t shared{};
    std::uint64_t exclusive{};
    std::uint64_t quarantined{};
  };
  [[nodiscard]] Count count() const noexcept;

 private:
  static constexpr std::int32_t kExclusive = -1;
  static constexpr std::int32_t kQuarantined = -2;

  void check(const BlockTables& tables, std::int32_t highest_allowed);
  template <class Change>
  void for_each(const BlockTables& tables, Change change) noexcept;

  std::vector<Group> groups_;
  mutable std::mutex mutex_;
  std::vector<std::size_t> pool_of_;              // by group: which of the following
  std::vector<std::vector<std::int32_t>> held_;   // one of the above, or the number of offers that hold the block
  std::vector<std::vector<std::uint32_t>> seen_;  // the last check that met the block: finds doubles in one pass
  std::uint32_t check_number_{0};
  Count count_;
};

}  // namespace kvlink::handoff
