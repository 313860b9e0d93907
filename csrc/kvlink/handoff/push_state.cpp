#include "kvlink/handoff/push_state.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvlink::handoff {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::invalid_argument, what);
}

[[nodiscard]] std::string text_of(std::uint64_t first, std::uint64_t end) {
  return "[" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

}  // namespace

PushState::PushState(std::shared_ptr<Holds> holds, std::shared_ptr<const plan::Template> cache,
                     std::uint64_t num_tokens, bool at_once)
    : holds_(std::move(holds)),
      cache_(std::move(cache)),
      num_tokens_(num_tokens),
      at_once_(at_once),
      groups_of_(cache_->layers().size(), std::vector<bool>(holds_->groups().size())),
      blocks_(holds_->groups().size()),
      seen_(blocks_.size()),
      told_(blocks_.size()),
      coverage_(cache_->layers().size(), num_tokens) {
  for (const plan::Op& op : cache_->ops()) groups_of_[op.layer][cache_->groups()[op.group].source_index] = true;
}

PushState::~PushState() {
  end({Code::closed, "the push was given up"});
}

void PushState::check_open() const {
  if (ended_) throw Error(ended_->code, ended_->message);
  if (committing_) refuse("the push was committed already; nothing more can be said about it");
}

void PushState::add(const BlockTables& more) {
  const std::lock_guard lock(mutex_);
  check_open();
  BlockTables fresh(blocks_.size());
  for (std::size_t g = 0; g < blocks_.size() && g < more.size(); ++g) {
    const Group& group = holds_->groups()[g];
    // Engines pad their tables: what lies behind the last token is not looked at.
    const std::uint64_t most = (num_tokens_ + group.block_tokens - 1) / group.block_tokens;
    const std::size_t room = group.slots ? more[g].size() : most - std::min<std::uint64_t>(most, blocks_[g].size());
    fresh[g].assign(more[g].begin(), more[g].begin() + static_cast<std::ptrdiff_t>(std::min(room, more[g].size())));
    for (const std::int32_t block : fresh[g]) {
      if (seen_[g].contains(block)) {
        refuse("add: block " + std::to_string(block) + " of group '" + group.name + "' belongs to the push already");
      }
    }
  }
  holds_->acquire_shared(fresh);
  for (std::size_t g = 0; g < fresh.size(); ++g) {
    blocks_[g].insert(blocks_[g].end(), fresh[g].begin(), fresh[g].end());
    std::ranges::copy_if(fresh[g], std::inserter(seen_[g], seen_[g].end()), [](auto block) { return block >= 0; });
  }
}

plan::Piece PushState::piece_of(std::span<const std::string> layers, std::uint64_t first, std::uint64_t end) const {
  const auto names = cache_->layers();
  plan::Piece piece{.layers = std::vector<bool>(names.size(), layers.empty()), .first_token = first, .end_token = end};
  for (const std::string& layer : layers) {
    const auto found = std::ranges::find(names, layer);
    if (found == names.end()) refuse("ready: this cache has no layer '" + layer + "'");
    const auto index = static_cast<std::size_t>(found - names.begin());
    if (piece.layers[index]) refuse("ready: layer '" + layer + "' is named twice");
    piece.layers[index] = true;
  }
  if (!coverage_.is_inside(piece)) {
    refuse("ready: tokens " + text_of(first, end) + " of a push of " + std::to_string(num_tokens_) + " tokens");
  }
  if (coverage_.is_new(piece)) return piece;
  for (std::size_t i = 0; i < names.size(); ++i) {
    plan::Piece alone{.layers = std::vector<bool>(names.size()), .first_token = first, .end_token = end};
    alone.layers[i] = piece.layers[i];
    if (!coverage_.is_new(alone)) {
      refuse("ready: tokens " + text_of(first, end) + " of layer '" + names[i] + "' are ready already, or some are");
    }
  }
  return piece;
}

void PushState::check_blocks(const plan::Piece& piece) const {
  for (std::size_t layer = 0; layer < piece.layers.size(); ++layer) {
    if (!piece.layers[layer]) continue;
    for (std::size_t g = 0; g < blocks_.size(); ++g) {
      const Group& group = holds_->groups()[g];
      const std::uint64_t there = std::uint64_t{group.block_tokens} * blocks_[g].size();
      if (!groups_of_[layer][g] || group.slots || piece.end_token <= there) continue;
      refuse("tokens up to " + std::to_string(piece.end_token) + " of layer '" + cache_->layers()[layer] +
             "' are ready, and the blocks of group '" + group.name + "' that were added hold " + std::to_string(there) +
             ": add more first");
    }
  }
}

std::uint64_t PushState::hold_back(std::span<const std::string> layers, std::uint64_t first, std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  check_open();
  plan::Piece piece = piece_of(layers, first, end);
  check_blocks(piece);
  coverage_.add(piece);
  held_back_.emplace(next_number_, std::move(piece));
  return next_number_++;
}

void PushState::announce(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = held_back_.find(number);
  if (found == held_back_.end()) return;
  ready_.push_back(std::move(found->second));
  held_back_.erase(found);
}

void PushState::commit(std::vector<std::byte> payload) {
  const std::lock_guard lock(mutex_);
  check_open();
  const auto missing = coverage_.missing();
  for (const plan::Piece& piece : missing) check_blocks(piece);
  for (const plan::Piece& piece : missing) coverage_.add(piece);
  ready_.insert(ready_.end(), missing.begin(), missing.end());
  payload_ = std::move(payload);
  committing_ = true;
}

PushState::Batch PushState::take() {
  const std::lock_guard lock(mutex_);
  Batch batch;
  if (ended_ || committed_) return batch;
  const bool last = committing_ && held_back_.empty();
  if (at_once_ && !last) return batch;
  batch.blocks.resize(blocks_.size());
  for (std::size_t g = 0; g < blocks_.size(); ++g) {
    batch.blocks[g].assign(blocks_[g].begin() + static_cast<std::ptrdiff_t>(told_[g]), blocks_[g].end());
    batch.has_blocks = batch.has_blocks || !batch.blocks[g].empty();
    told_[g] = blocks_[g].size();
  }
  batch.pieces = plan::joined(ready_);
  ready_.clear();
  if (last) {
    batch.commit = std::move(payload_);
    committed_ = true;
  }
  return batch;
}

bool PushState::is_committed() const {
  const std::lock_guard lock(mutex_);
  return committed_;
}

BlockTables PushState::blocks() const {
  const std::lock_guard lock(mutex_);
  return blocks_;
}

void PushState::end(const Failure& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  ended_ = why;
  holds_->release_shared(blocks_);
  held_back_.clear();
  ready_.clear();
}

}  // namespace kvlink::handoff
