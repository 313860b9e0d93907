#include "kvlink/handoff/retired_ids.hpp"

#include <algorithm>
#include <limits>

namespace kvlink::handoff {

const char* why_retired(Retirement retirement) noexcept {
  switch (retirement) {
    case Retirement::none:
      return "this ticket was not offered here";
    case Retirement::ended:
      return "this ticket was offered here before, and has ended; make a new one";
    case Retirement::mint_forgotten:
      return "the mint of this ticket was not used here for long, while many others were: make a new mint";
    case Retirement::too_many_mints:
      return "this node has known as many mints as it can: suspend and resume it, or start it again";
  }
  return "unknown";
}

void EndedSequences::add(std::uint64_t sequence) {
  if (contains(sequence)) return;
  constexpr std::uint64_t most_words = kBitmap / kWordBits;
  constexpr std::uint64_t last_watermark = std::numeric_limits<std::uint64_t>::max() - (kWordBits - 1);
  std::uint64_t word = (sequence - watermark_) / kWordBits;
  if (word >= most_words) {
    const std::uint64_t dropped = word - (most_words - 1);
    words_.erase(words_.begin(),
                 words_.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(dropped, words_.size())));
    watermark_ += dropped * kWordBits;
    word -= dropped;
  }
  if (word >= words_.size()) words_.resize(word + 1, 0);
  words_[word] |= std::uint64_t{1} << (sequence % kWordBits);
  // The last word stays: a watermark behind it would wrap around to 0.
  while (!words_.empty() && ~words_.front() == 0 && watermark_ != last_watermark) {
    words_.pop_front();
    watermark_ += kWordBits;
  }
}

bool EndedSequences::contains(std::uint64_t sequence) const noexcept {
  if (sequence < watermark_) return true;
  const std::uint64_t word = (sequence - watermark_) / kWordBits;
  return word < words_.size() && (words_[word] >> (sequence % kWordBits) & 1U) != 0;
}

EndedSequences* RetiredIds::sequences_of(const Epoch& epoch) {
  if (epoch == own_) return &own_ended_;
  if (forgotten_.contains(epoch)) return nullptr;
  auto found = mints_.find(epoch);
  if (found == mints_.end()) {
    if (mints_.size() >= kMints) {
      const auto oldest = std::ranges::min_element(mints_, {}, [](const auto& each) { return each.second.last_use; });
      forgotten_.insert(oldest->first);
      mints_.erase(oldest);
    }
    found = mints_.emplace(epoch, Mint{}).first;
  }
  found->second.last_use = ++uses_;
  return &found->second.ended;
}

void RetiredIds::use(const Epoch& epoch) {
  (void)sequences_of(epoch);
}

void RetiredIds::add(const HandoffId& id) {
  if (EndedSequences* const sequences = sequences_of(id.epoch)) sequences->add(id.sequence);
}

Retirement RetiredIds::look_up(const HandoffId& id) const noexcept {
  const auto of = [&id](const EndedSequences& ended) {
    return ended.contains(id.sequence) ? Retirement::ended : Retirement::none;
  };
  if (id.epoch == own_) return of(own_ended_);
  if (const auto found = mints_.find(id.epoch); found != mints_.end()) return of(found->second.ended);
  if (forgotten_.contains(id.epoch)) return Retirement::mint_forgotten;
  return mints_.size() >= kMints && forgotten_.size() >= kForgotten ? Retirement::too_many_mints : Retirement::none;
}

}  // namespace kvlink::handoff
