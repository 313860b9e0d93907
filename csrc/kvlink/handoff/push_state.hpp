// What the owner of a push has said so far: which blocks there are, and which layers are ready for which tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/plan/pieces.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::handoff {

/// Thread-safe: the owner's threads say something, the progress thread passes it on. Owns the push's shared hold.
class PushState {
 public:
  /// `cache`: this node's cache paired with itself; says which layers there are, and which groups they are of. With
  /// `at_once`, nothing is passed on before `commit`.
  PushState(std::shared_ptr<Holds> holds, std::shared_ptr<const plan::Template> cache, std::uint64_t num_tokens,
            bool at_once);
  ~PushState();
  PushState(const PushState&) = delete;
  PushState& operator=(const PushState&) = delete;

  /// Holds more blocks: entries that follow those of before, one list a group. Throws Error(invalid_argument) for what
  /// is out of range or there already, Error(blocks_busy), or what the push has ended with.
  void add(const BlockTables& more);
  /// Layers by name, none: all; the tokens [first, end). Returns the number of what waits for `announce`. Throws
  /// Error(invalid_argument) for what is ready already, out of range, unknown, or has no blocks yet, or what the push
  /// has ended with.
  [[nodiscard]] std::uint64_t hold_back(std::span<const std::string> layers, std::uint64_t first, std::uint64_t end);
  /// What was held back is ready now. Nothing, if the push has ended.
  void announce(std::uint64_t number);
  /// All is ready, but for what is held back, and nothing more comes. Throws as `hold_back`.
  void commit(std::vector<std::byte> payload);

  /// What the target has not been told yet.
  struct Batch {
    std::vector<plan::Piece> pieces;
    BlockTables blocks;
    bool has_blocks{false};
    std::optional<std::vector<std::byte>> commit;
  };
  [[nodiscard]] Batch take();
  /// Whether COMMIT was handed out by `take`.
  [[nodiscard]] bool is_committed() const;
  [[nodiscard]] BlockTables blocks() const;
  /// Layers as pieces name them.
  [[nodiscard]] std::span<const std::string> layers() const noexcept { return cache_->layers(); }
  [[nodiscard]] std::uint64_t num_tokens() const noexcept { return num_tokens_; }
  /// Gives the blocks back; everything fails from now on, for `why`. Idempotent.
  void end(const Failure& why) noexcept;

 private:
  [[nodiscard]] plan::Piece piece_of(std::span<const std::string> layers, std::uint64_t first, std::uint64_t end) const;
  void check_blocks(const plan::Piece& piece) const;
  void check_open() const;

  const std::shared_ptr<Holds> holds_;
  const std::shared_ptr<const plan::Template> cache_;
  const std::uint64_t num_tokens_;
  const bool at_once_;
  std::vector<std::vector<bool>> groups_of_;  // by layer

  mutable std::mutex mutex_;  // guards what follows
  std::optional<Failure> ended_;
  BlockTables blocks_;
  std::vector<std::unordered_set<std::int32_t>> seen_;  // by group
  std::vector<std::size_t> told_;                       // entries of `blocks_` that the target knows
  plan::Coverage coverage_;
  std::map<std::uint64_t, plan::Piece> held_back_;
  std::uint64_t next_number_{0};
  std::vector<plan::Piece> ready_;  // and not told
  std::optional<std::vector<std::byte>> payload_;
  bool committing_{false};
  bool committed_{false};
};

}  // namespace kvlink::handoff
