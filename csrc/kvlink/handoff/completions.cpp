#include "kvlink/handoff/completions.hpp"

#include <algorithm>

#include "kvlink/handoff/handoff.hpp"

namespace kvlink::handoff {

Completions::Completions(std::shared_ptr<const Bells> bells) : bells_(std::move(bells)) {}

void Completions::add(Entry entry) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(entry);
}

void Completions::add_ended(std::uint64_t token) {
  {
    const std::lock_guard lock(mutex_);
    entries_.push_back({.token = token, .released = false});
    entries_.push_back({.token = token, .released = true});
  }
  bells_->ring();
}

std::vector<Completions::Entry> Completions::take(std::size_t most, bool resets_bell) {
  // Before the look: an event that comes later rings again.
  if (resets_bell) bells_->engine.clear();
  const std::lock_guard lock(mutex_);
  const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(std::min(most, entries_.size()));
  std::vector<Entry> taken(entries_.begin(), end);
  entries_.erase(entries_.begin(), end);
  if (resets_bell && !entries_.empty()) bells_->engine.ring();
  return taken;
}

}  // namespace kvlink::handoff
