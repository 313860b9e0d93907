// What a target's FETCH or CHECK asks of this node's memory, checked against what it was granted.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/messages.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::handoff {

/// Which of so many layers `ranges` name; they must be that many at least.
[[nodiscard]] std::vector<bool> mask_of(std::span<const LayerRange> ranges, std::size_t layers);
[[nodiscard]] std::vector<LayerRange> ranges_of(const std::vector<bool>& mask);

/// The source's half of a plan: `offered` are the offer's tables by this node's groups, `fetch` lists pieces by the
/// template's groups. Throws Error(not_offered) for a piece outside of the offered blocks, Error(protocol_error) for
/// what cannot be pieces.
[[nodiscard]] std::shared_ptr<const plan::Plan> plan_of_fetch(const Peer& peer, const Fetch& fetch,
                                                              const BlockTables& offered,
                                                              const std::vector<Group>& groups);

/// Whether pieces of such blocks can be written. Throws Error(layout_mismatch) if not.
void check_pieces(const plan::Template& geometry);

/// The target's side of the same: the pieces that the pairs of `plan` read.
[[nodiscard]] Fetch fetch_of_plan(const plan::Plan& plan);

}  // namespace kvlink::handoff
