// Stage 2. Elements that arrive in another dtype than the target keeps: where they wait, and where each goes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::plan {

/// The dtypes between which elements can be converted.
enum class Dtype : std::uint8_t { float32, float16, bfloat16 };

[[nodiscard]] constexpr std::uint32_t dtype_bytes(Dtype dtype) noexcept {
  return dtype == Dtype::float32 ? 4 : 2;
}
/// By the name that layouts use; none for every other dtype.
[[nodiscard]] std::optional<Dtype> dtype_from_name(std::string_view name) noexcept;

struct DtypePair {
  Dtype from{};
  Dtype to{};
};

/// From the scratch memory of a part to the target's blocks, compiled once per peer pair. Immutable.
///
/// What arrives in another dtype is laid out in scratch memory, which has places for as many blocks as the target has
/// and stands behind the target's own regions, as one more. Then this says which elements become which.
class Conversion {
 public:
  /// `geometry` is of elements: its target side is the target's own memory, and its source side counts as if elements
  /// in scratch memory were as long as those that they become. Source region `i` is scratch memory whose elements
  /// are converted as `pairs[i]` says. Ops with longer elements come first, so that a stream that is cut at a
  /// multiple of the longest is cut between elements. Throws Error(invalid_argument) if that does not hold.
  Conversion(std::shared_ptr<const Template> geometry, std::vector<DtypePair> pairs, std::uint64_t scratch_bytes);

  [[nodiscard]] const Template& geometry() const noexcept { return *geometry_; }
  [[nodiscard]] const DtypePair& pair(std::uint32_t region) const noexcept { return pairs_[region]; }
  [[nodiscard]] std::uint64_t scratch_bytes() const noexcept { return scratch_bytes_; }
  /// Where scratch memory stands among the regions.
  [[nodiscard]] std::uint32_t scratch_region() const noexcept {
    return static_cast<std::uint32_t>(geometry_->target_region_bytes().size());
  }

  /// One request in two steps.
  struct Steps {
    std::vector<std::vector<BlockPair>> arrive;  // for the plan that a lane moves: into scratch memory
    std::shared_ptr<const Plan> convert;         // then from there; its copies count as the geometry does
    bool dense{true};                            // of each group's scratch memory the first blocks are taken
  };
  /// `pairs` are of the target's own blocks, and of the template `arriving` that leads into scratch memory. There they
  /// are numbered anew, so that a request lies together, but in a group of which something goes to the target directly.
  [[nodiscard]] Steps steps_of(const Template& arriving, std::vector<std::vector<BlockPair>> pairs) const;

 private:
  std::shared_ptr<const Template> geometry_;
  std::vector<DtypePair> pairs_;
  std::uint64_t scratch_bytes_;
};

}  // namespace kvlink::plan
