// Elements that arrive in another dtype: where they wait, and how they get into the target's blocks.
#include <new>
#include <utility>

#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/transport/convert_transfer.hpp"

namespace kvlink::handoff {

std::shared_ptr<const plan::Plan> PullBook::plan_of(Part& part, std::vector<std::vector<plan::BlockPair>> pairs) {
  const auto& geometry = part.peer->layout_template;
  if (part.peer->conversion) {
    auto steps = part.peer->conversion->steps_of(*geometry, std::move(pairs));
    pairs = std::move(steps.arrive);
    part.convert_plan = std::move(steps.convert);
    part.dense = steps.dense;
  }
  return std::make_shared<const plan::Plan>(geometry, std::move(pairs));
}

std::shared_ptr<const transport::LocalMemory> PullBook::memory_of(Part& part) const {
  const auto& conversion = part.peer->conversion;
  if (!conversion) return services_.memory;
  part.scratch = std::make_shared<const transport::ScratchMemory>(*services_.memory, conversion->scratch_bytes(),
                                                                  part.dense ? part.plan->total_bytes() : 0);
  return part.scratch;
}

void PullBook::convert_blocks(const PartPtr& part) {
  try {
    part->converting = transport::make_convert_transfer(part->peer->conversion, part->convert_plan, part->scratch,
                                                        *services_.copy_threads, services_.waker);
  } catch (const std::bad_alloc&) {
    return fail(part, {Code::out_of_memory, "no memory to convert what arrived"});
  }
  part->converting->start();
  step_part(part, On::turn, {.peer = part->peer});  // A small one is converted already.
}

void PullBook::let_go_of_scratch(Part& part) {
  // Without threads the node closes, and nothing waits behind this one.
  if (part.scratch && services_.copy_threads) {
    transport::ScratchMemory::give_back(part.scratch, *services_.copy_threads);
  }
  part.scratch.reset();
}

}  // namespace kvlink::handoff
