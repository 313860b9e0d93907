// What has happened to the handoffs that an engine submitted, in its order, until the engine takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace kvlink::handoff {

struct Bells;

/// Thread-safe. Whoever subscribes a handoff bounds the queue, since each adds two entries in its life.
class Completions {
 public:
  /// One event of one handoff; `token` is what it was subscribed with.
  struct Entry {
    std::uint64_t token{};
    bool released{};
  };

  explicit Completions(std::shared_ptr<const Bells> bells);

  /// Does not ring: a handoff rings its bells itself, once per event.
  void add(Entry entry);
  /// Both events of something that never started. Rings.
  void add_ended(std::uint64_t token);
  /// The oldest `most`. With `resets_bell` it resets the engine's bell first, and leaves it ringing when there are
  /// more.
  [[nodiscard]] std::vector<Entry> take(std::size_t most, bool resets_bell);

 private:
  const std::shared_ptr<const Bells> bells_;
  std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace kvlink::handoff
