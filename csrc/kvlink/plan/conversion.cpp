#include "kvlink/plan/conversion.hpp"

#include <limits>
#include <string>
#include <utility>

#include "kvlink/error.hpp"

namespace kvlink::plan {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::invalid_argument, "compile a conversion: " + what);
}

/// Gives the target's blocks the numbers 0, 1, 2 ... in the order of their tokens.
void number_anew(std::vector<BlockPair>& pairs) noexcept {
  std::int32_t before = -1;
  std::int32_t number = -1;
  for (BlockPair& pair : pairs) {  // A table has no block twice, so the pairs of one are neighbours.
    if (std::exchange(before, pair.target_block) != pair.target_block) ++number;
    pair.target_block = number;
  }
}

}  // namespace

std::optional<Dtype> dtype_from_name(std::string_view name) noexcept {
  if (name == "float32") return Dtype::float32;
  if (name == "float16") return Dtype::float16;
  if (name == "bfloat16") return Dtype::bfloat16;
  return std::nullopt;
}

Conversion::Conversion(std::shared_ptr<const Template> geometry, std::vector<DtypePair> pairs,
                       std::uint64_t scratch_bytes)
    : geometry_(std::move(geometry)), pairs_(std::move(pairs)), scratch_bytes_(scratch_bytes) {
  const auto regions = geometry_->source_region_bytes();
  if (regions.size() != pairs_.size()) refuse("a pair of dtypes is missing");
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    if (regions[i] / dtype_bytes(pairs_[i].to) > scratch_bytes_ / dtype_bytes(pairs_[i].from)) {
      refuse("its elements leave scratch memory");
    }
  }
  std::uint32_t longest = std::numeric_limits<std::uint32_t>::max();
  for (const Op& op : geometry_->ops()) {
    // The geometry has checked that the region is one.
    if (op.element_bytes != dtype_bytes(pairs_[op.source.region].to)) refuse("an op has elements of another length");
    if (op.element_bytes > longest) refuse("an op with longer elements comes behind one with shorter ones");
    longest = op.element_bytes;
  }
}

Conversion::Steps Conversion::steps_of(const Template& arriving, std::vector<std::vector<BlockPair>> pairs) const {
  std::vector<bool> has_direct(pairs.size(), false);
  for (const Op& op : arriving.ops()) {
    if (op.target.region != scratch_region()) has_direct[op.group] = true;
  }
  Steps steps{.arrive = std::move(pairs), .convert = nullptr};
  std::vector<std::vector<BlockPair>> converted(steps.arrive.size());
  for (std::size_t group = 0; group < converted.size(); ++group) {
    if (geometry_->token_bytes(group) == 0) continue;
    converted[group] = steps.arrive[group];
    if (has_direct[group]) {
      steps.dense = false;
    } else {
      number_anew(steps.arrive[group]);
    }
    for (std::size_t i = 0; i < converted[group].size(); ++i) {
      converted[group][i].source_block = steps.arrive[group][i].target_block;
      converted[group][i].source_token = steps.arrive[group][i].target_token;
    }
  }
  steps.convert = std::make_shared<const Plan>(geometry_, std::move(converted));
  return steps;
}

}  // namespace kvlink::plan
