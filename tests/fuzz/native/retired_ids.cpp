// Which handoffs have ended, told by whoever may name ids: what has ended never counts as new again, and what has not
// counts as new for as long as it is near the newest.
#include <map>
#include <set>

#include "fuzz.hpp"
#include "kvlink/handoff/retired_ids.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

/// What has ended of one epoch, kept in full.
struct Model {
  std::set<std::uint64_t> ended;
  [[nodiscard]] bool is_near(std::uint64_t sequence) const {
    const std::uint64_t newest = ended.empty() ? 0 : *ended.rbegin();
    return newest < EndedSequences::kBitmap / 2 || sequence > newest - EndedSequences::kBitmap / 2;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const Epoch own{1};
  RetiredIds retired(own);
  std::map<Epoch, Model> models;
  const std::uint64_t base = input.edgy(4);
  for (int steps = 0; steps < 24 && !input.empty(); ++steps) {
    const std::uint8_t what = input.byte();
    const Epoch epoch{static_cast<std::uint8_t>(1 + what / 4 % 2)};
    std::uint64_t sequence = input.edgy(200);
    if ((what & 2U) != 0) sequence += base;
    if (sequence == 0) sequence = 1;  // no handoff has number 0
    Model& model = models[epoch];
    if ((what & 1U) != 0) {
      retired.add({.epoch = epoch, .sequence = sequence});
      model.ended.insert(sequence);
      HOLDS(retired.look_up({.epoch = epoch, .sequence = sequence}) == Retirement::ended);
    } else {
      const bool ended = retired.look_up({.epoch = epoch, .sequence = sequence}) == Retirement::ended;
      HOLDS(!model.ended.contains(sequence) || ended);
      HOLDS(!ended || model.ended.contains(sequence) || !model.is_near(sequence));
    }
  }
  for (const auto& [epoch, model] : models) {
    for (const std::uint64_t sequence : model.ended) {
      HOLDS(retired.look_up({.epoch = epoch, .sequence = sequence}) == Retirement::ended);
    }
  }
  return 0;
}
