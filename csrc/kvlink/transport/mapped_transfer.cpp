#include "kvlink/transport/mapped_transfer.hpp"

#include <optional>
#include <string>
#include <utility>

#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/copy_kernels.hpp"
#include "kvlink/transport/sliced_transfer.hpp"

namespace kvlink::transport {
namespace {

class MappedCopier final : public SliceCopier {
 public:
  MappedCopier(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const MappedSource> source,
               std::shared_ptr<const LocalMemory> target)
      : plan_(std::move(plan)),
        source_(std::move(source)),
        target_(std::move(target)),
        stores_(plan_->total_bytes() >= kStreamingBytes ? Stores::streaming : Stores::cached) {}

  std::uint64_t total_bytes() const noexcept override { return plan_->total_bytes(); }

  std::optional<SliceFailure> copy(StreamRange range) const noexcept override {
    CopySequence copies(stores_);
    plan_->visit(range.begin, range.end, [&](const plan::StridedCopy& copy) noexcept {
      copies.add(source_->regions[copy.source_region]->base() + copy.source_offset,
                 target_->at(copy.target_region, copy.target_offset), copy);
    });
    copies.finish(range.end - range.begin);
    return std::nullopt;
  }

 private:
  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const MappedSource> source_;
  std::shared_ptr<const LocalMemory> target_;
  Stores stores_;
};

}  // namespace

std::shared_ptr<Transfer> make_mapped_transfer(std::shared_ptr<const plan::Plan> plan,
                                               std::shared_ptr<const MappedSource> source,
                                               std::shared_ptr<const LocalMemory> target, CopyThreads& threads,
                                               const Waker& waker) {
  check_target(*plan, *target);
  const auto stated = plan->geometry().source_region_bytes();
  if (source->regions.size() != stated.size()) {
    throw Error(Code::invalid_argument, "copy by the mapped lane: the source has " + std::to_string(stated.size()) +
                                            " regions, mapped are " + std::to_string(source->regions.size()));
  }
  for (std::size_t i = 0; i < stated.size(); ++i) {
    if (!source->regions[i] || source->regions[i]->bytes() < stated[i]) {
      throw Error(Code::invalid_argument,
                  "copy by the mapped lane: region " + std::to_string(i) + " of the source is not mapped as a whole");
    }
  }
  return std::make_shared<SlicedTransfer>(
      std::make_unique<MappedCopier>(std::move(plan), std::move(source), std::move(target)), threads, waker);
}

}  // namespace kvlink::transport
