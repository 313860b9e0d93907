#include "kvlink/handoff/holds.hpp"

#include <algorithm>

#include "kvlink/error.hpp"

namespace kvlink::handoff {

BlockTables touched(const BlockTables& tables, const std::vector<Group>& groups, std::uint64_t first,
                    std::uint64_t end) {
  if (tables.size() != groups.size()) {
    throw Error(Code::invalid_argument, "block tables for " + std::to_string(tables.size()) +
                                            " groups, the cache has " + std::to_string(groups.size()));
  }
  BlockTables out;
  for (std::size_t g = 0; g < tables.size(); ++g) {
    if (groups[g].slots) {
      out.push_back(tables[g]);
      continue;
    }
    const std::uint64_t tokens = groups[g].block_tokens;
    const std::uint64_t needed = (end + tokens - 1) / tokens;
    if (tables[g].size() < needed) {
      throw Error(Code::invalid_argument, std::to_string(end) + " tokens need " + std::to_string(needed) +
                                              " blocks of group '" + groups[g].name + "', " +
                                              std::to_string(tables[g].size()) + " are given");
    }
    auto& kept = out.emplace_back(tables[g].begin(), tables[g].begin() + static_cast<std::ptrdiff_t>(needed));
    const bool slides = groups[g].window != 0 && end > groups[g].window;
    const std::uint64_t from = slides ? std::max<std::uint64_t>(first, end - groups[g].window) : first;
    std::fill_n(kept.begin(), from >= end ? needed : from / tokens, -1);
  }
  return out;
}

Holds::Holds(std::vector<Group> groups) : groups_(std::move(groups)) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto first = std::ranges::find(groups_, groups_[g].pool, &Group::pool);
    const auto earlier = static_cast<std::size_t>(first - groups_.begin());
    if (earlier == g) {
      pool_of_.push_back(held_.size());
      held_.emplace_back();
      seen_.emplace_back();
    } else {
      pool_of_.push_back(pool_of_[earlier]);
    }
    auto& held = held_[pool_of_[g]];
    held.resize(std::max<std::size_t>(held.size(), groups_[g].num_blocks), 0);
    seen_[pool_of_[g]].resize(held.size(), 0U);
  }
}

void Holds::check(const BlockTables& tables, std::int32_t highest_allowed) {
  if (tables.size() != groups_.size()) {
    throw Error(Code::invalid_argument, "block tables for " + std::to_string(tables.size()) +
                                            " groups, the cache has " + std::to_string(groups_.size()));
  }
  ++check_number_;
  for (std::size_t g = 0; g < tables.size(); ++g) {
    const std::string& name = groups_[g].name;
    for (const std::int32_t block : tables[g]) {
      if (block == -1) continue;
      if (block < 0 || static_cast<std::uint32_t>(block) >= groups_[g].num_blocks) {
        throw Error(Code::invalid_argument, "block " + std::to_string(block) + " of group '" + name +
                                                "' is outside [0, " + std::to_string(groups_[g].num_blocks) + ")");
      }
      const auto index = static_cast<std::size_t>(block);
      if (seen_[pool_of_[g]][index] == check_number_) {
        throw Error(Code::invalid_argument,
                    "block " + std::to_string(block) + " of group '" + name + "' appears twice");
      }
      seen_[pool_of_[g]][index] = check_number_;
      const std::int32_t held = held_[pool_of_[g]][index];
      if (held < 0 || held > highest_allowed) {
        throw Error(Code::blocks_busy,
                    "block " + std::to_string(block) + " of group '" + name + "' is " +
                        (held == kExclusive     ? "written by a live pull"
                         : held == kQuarantined ? "in quarantine: a pull that has ended may still write it"
                                                : "read by a live offer") +
                        "; wait for its `released` event before using it again");
      }
    }
  }
}

template <class Change>
void Holds::for_each(const BlockTables& tables, Change change) noexcept {
  for (std::size_t g = 0; g < tables.size(); ++g) {
    for (const std::int32_t block : tables[g]) {
      if (block != -1) change(held_[pool_of_[g]][static_cast<std::size_t>(block)]);
    }
  }
}

void Holds::acquire_shared(const BlockTables& tables) {
  const std::lock_guard lock(mutex_);
  check(tables, INT32_MAX - 1);
  for_each(tables, [this](std::int32_t& held) {
    if (held++ == 0) ++count_.shared;
  });
}

void Holds::acquire_exclusive(const BlockTables& tables) {
  const std::lock_guard lock(mutex_);
  check(tables, 0);
  for_each(tables, [this](std::int32_t& held) {
    held = kExclusive;
    ++count_.exclusive;
  });
}

void Holds::quarantine(const BlockTables& tables) noexcept {
  const std::lock_guard lock(mutex_);
  for_each(tables, [this](std::int32_t& held) {
    held = kQuarantined;
    --count_.exclusive;
    ++count_.quarantined;
  });
}

void Holds::release_shared(const BlockTables& tables) noexcept {
  const std::lock_guard lock(mutex_);
  for_each(tables, [this](std::int32_t& held) {
    if (--held == 0) --count_.shared;
  });
}

void Holds::release_exclusive(const BlockTables& tables) noexcept {
  const std::lock_guard lock(mutex_);
  for_each(tables, [this](std::int32_t& held) {
    --(held == kQuarantined ? count_.quarantined : count_.exclusive);
    held = 0;
  });
}

Holds::Count Holds::count() const noexcept {
  const std::lock_guard lock(mutex_);
  return count_;
}

}  // namespace kvlink::handoff
