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

std::shared_ptr<const Plan> Conversion::plan_of(const Plan& moved) const {
  std::vector<std::vector<BlockPair>> pairs(geometry_->groups().size());
  for (std::size_t group = 0; group < pairs.size(); ++group) {
    if (geometry_->token_bytes(group) == 0) continue;
    const auto arrived = moved.pairs(group);
    pairs[group].assign(arrived.begin(), arrived.end());
    for (BlockPair& pair : pairs[group]) {  // Scratch memory has the target's blocks.
      pair.source_block = pair.target_block;
      pair.source_token = pair.target_token;
    }
  }
  return std::make_shared<const Plan>(geometry_, std::move(pairs));
}

}  // namespace kvlink::plan
