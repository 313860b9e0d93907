#include "kvlink/plan/cell.hpp"

namespace kvlink::plan {
namespace {

CellLoop loop_of(const Op& op, CellAxis axis, std::uint32_t tokens) noexcept {
  switch (axis) {
    case CellAxis::token:
      return {tokens, op.source.token_stride, op.target.token_stride};
    case CellAxis::head:
      return {op.heads, op.source.head_stride, op.target.head_stride};
    case CellAxis::dim:
      return {op.dims, op.source.dim_stride, op.target.dim_stride};
  }
  return {};
}

}  // namespace

CellShape cell_shape(const Op& op, const std::array<CellAxis, 3>& loop_order, std::uint32_t tokens,
                     Sides sides) noexcept {
  CellShape shape{.run_bytes = op.element_bytes, .bytes = op.element_bytes, .depth = 0, .loops = {}};
  for (const auto axis : loop_order) {
    auto loop = loop_of(op, axis, tokens);
    if (loop.count == 1) continue;
    // In the packed stream each loop follows the one inside it without a gap.
    if (sides == Sides::source) loop.target_stride = shape.bytes;
    if (sides == Sides::target) loop.source_stride = shape.bytes;
    shape.bytes *= loop.count;
    auto* inside = shape.depth == 0 ? nullptr : &shape.loops[shape.depth - 1];
    if (inside == nullptr && loop.source_stride == shape.run_bytes && loop.target_stride == shape.run_bytes) {
      shape.run_bytes *= loop.count;
    } else if (inside != nullptr && loop.source_stride == inside->source_stride * inside->count &&
               loop.target_stride == inside->target_stride * inside->count) {
      inside->count *= loop.count;
    } else {
      shape.loops[shape.depth++] = loop;
    }
  }
  return shape;
}

}  // namespace kvlink::plan
