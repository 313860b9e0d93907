// Integrity at the target: what it asks the source to sum, sums itself, compares, and says of what differs.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/handoff/source_plan.hpp"

namespace kvlink::handoff {

void PullBook::perform_check(Do action, const PartPtr& part, const News& news) {
  switch (action) {
    case Do::send_check:
      send_check(*part);
      break;
    case Do::sum_blocks:
      sum_blocks(part);
      break;
    case Do::take_sums:
      take_sums(part, *news.sums);
      break;
    default:
      assert(false && "a row asks a part for what only another machine does");
  }
}

void PullBook::send_check(Part& part) {
  part.cells = std::make_shared<const plan::SumCells>(part.plan, plan::Sides::target);
  if (part.peer->channel) {
    write_pieces(part.peer->channel->outbox(), Kind::check, part.attempt, fetch_of_plan(*part.plan));
  }
}

void PullBook::sum_blocks(const PartPtr& part) {
  try {
    part->summing = std::make_shared<transport::Summing>(part->cells, part->integrity, services_.memory,
                                                         *services_.copy_threads, services_.waker);
  } catch (const std::bad_alloc&) {
    return fail(part, {Code::out_of_memory, "no memory for the sums of what arrived"});
  }
  want_turns(*part);
  part->summing->start();
  step_part(part, On::turn, {.peer = part->peer});  // A small one is summed already.
}

void PullBook::take_sums(const PartPtr& part, const Sums& sums) {
  if (sums.first_byte != part->source_sums.size() ||
      sums.bytes.size() > part->total_sum_bytes() - part->source_sums.size()) {
    return fail(part, {Code::protocol_error, "the source sent more sums than were asked for, or out of order"});
  }
  part->source_sums.insert(part->source_sums.end(), sums.bytes.begin(), sums.bytes.end());
  step_part(part, On::turn, {.peer = part->peer});
}

std::vector<plan::FailedRange> PullBook::differing(const Part& part) {
  const std::size_t width = transport::sum_bytes(part.integrity);
  const auto sums = part.summing->sums();
  return part.cells->describe([&](std::uint64_t cell) {
    return std::memcmp(sums.data() + cell * width, part.source_sums.data() + cell * width, width) != 0;
  });
}

void PullBook::note_corruption(Pull& pull) {
  for (const PartRequest& request : pull.request.parts) {
    const PartPtr part = find(request.attempt);
    if (!part || !part->checked) continue;
    const auto ranges = differing(*part);
    if (ranges.empty()) continue;
    const plan::FailedRange& first = ranges.front();
    const auto span = [](std::uint64_t begin, std::uint64_t end) {
      return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
    };
    return note_failure(
        pull, {part->peer,
               {Code::data_corrupted,
                "what arrived has other " + std::string(transport::integrity_name(part->integrity)) +
                    " sums than the source in " + std::to_string(ranges.size()) + " range(s), the first of them " +
                    std::string(plan::component_name(first.component)) + " of layer '" +
                    part->peer->layout_template->layers()[first.layer] + "', heads " +
                    span(first.first_head, first.end_head) + ", tokens " + span(first.first_token, first.end_token) +
                    ": recompute what `failed` names, or pull again"}});
  }
}

std::uint64_t PullBook::valid_prefix_of(const Pull& pull) const {
  const std::uint64_t had = pull.request.skip_tokens;
  const std::uint64_t end = pull.request.num_tokens;
  std::uint64_t valid = end;
  bool is_whole = true;  // a prefix of what was asked for is of use by itself
  for (const PartRequest& request : pull.request.parts) {
    const PartPtr part = find(request.attempt);
    if (!part || part->at == At::valid) continue;
    // Without VALID or sums no byte that was read may be called right, so only what the caller had before counts (P1,
    // P4). Equal sums are as good: they were made, and sent, while the grant lived.
    if (!part->checked && !(part->whole_plan() != nullptr && part->plan->total_bytes() == 0)) return had;
    if (!part->checked) continue;
    for (const plan::FailedRange& range : differing(*part)) valid = std::min(valid, range.first_token);
    const plan::Template& geometry = part->plan->geometry();
    for (std::size_t g = 0; g < geometry.groups().size(); ++g) {
      const plan::GroupGeometry& group = geometry.groups()[g];
      // State, and the window at the end of a longer request, are of use to the whole request only.
      const bool whole = !group.slots && group.first_wanted_token(had, end) == had;
      is_whole = is_whole && (whole || part->plan->pairs(g).empty());
    }
  }
  return valid == end || is_whole ? std::max(valid, had) : had;
}

}  // namespace kvlink::handoff
