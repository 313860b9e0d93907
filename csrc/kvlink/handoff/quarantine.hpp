// Whose blocks are in quarantine: those of pulls that have their outcome while something may still write.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kvlink/ids.hpp"

namespace kvlink::handoff {

/// Thread-safe. Keeps no time: a pull leaves when its transfers have drained, or with the node (I18).
class Quarantine {
 public:
  /// `peers`: those whose transfers have not drained, for messages.
  void enter(const AttemptId& pull, std::uint64_t blocks, std::vector<std::string> peers);
  /// Harmless for one that is not in it.
  void leave(const AttemptId& pull) noexcept;

  /// Throws Error(not_ready) while more than `most_blocks` are in it: it says how many, of whom, and what to do.
  void check(std::uint64_t most_blocks) const;

 private:
  struct Entry {
    std::uint64_t blocks{};
    std::vector<std::string> peers;
  };
  [[nodiscard]] std::string named_peers() const;

  mutable std::mutex mutex_;
  std::map<AttemptId, Entry> entries_;
  std::uint64_t blocks_{0};
};

}  // namespace kvlink::handoff
