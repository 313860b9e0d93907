#include "kvlink/handoff/quarantine.hpp"

#include <cstddef>
#include <set>
#include <utility>

#include "kvlink/error.hpp"

namespace kvlink::handoff {
namespace {

/// A message names no more peers than a person reads.
constexpr std::size_t kNamedPeers = 8;

}  // namespace

void Quarantine::enter(const AttemptId& pull, std::uint64_t blocks, std::vector<std::string> peers) {
  const std::lock_guard lock(mutex_);
  entries_.emplace(pull, Entry{.blocks = blocks, .peers = std::move(peers)});
  blocks_ += blocks;
}

void Quarantine::leave(const AttemptId& pull) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(pull);
  if (found == entries_.end()) return;
  blocks_ -= found->second.blocks;
  entries_.erase(found);
}

std::string Quarantine::named_peers() const {
  std::set<std::string> peers;
  for (const auto& [pull, entry] : entries_) peers.insert(entry.peers.begin(), entry.peers.end());
  std::string text;
  std::size_t named = 0;
  for (const std::string& peer : peers) {
    if (named == kNamedPeers) return text + " and " + std::to_string(peers.size() - named) + " more";
    text += (named++ == 0 ? "" : ", ") + peer;
  }
  return text;
}

void Quarantine::check(std::uint64_t most_blocks) const {
  const std::lock_guard lock(mutex_);
  if (blocks_ <= most_blocks) return;
  throw Error(Code::not_ready,
              "pull: " + std::to_string(blocks_) + " blocks of " + std::to_string(entries_.size()) +
                  " pulls that have ended are in quarantine, the limit is " + std::to_string(most_blocks) +
                  ": transfers from " + named_peers() +
                  " may still write them. Pull at another node; this one takes pulls again by itself once they drain");
}

}  // namespace kvlink::handoff
