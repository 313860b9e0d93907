#include "kvlink/transport/faulty_receiver.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"

namespace kvlink::transport {
namespace {

using Purpose = FaultDraws::Purpose;

/// Chunks that overtake each other although the script does not delay them do so within this time.
constexpr double kShuffleMs = 1.0;
/// How long a refusal for want of resources holds a chunk up.
constexpr double kRefusedMs = 0.5;

[[nodiscard]] std::int64_t nanoseconds(double ms) noexcept {
  return static_cast<std::int64_t>(ms * static_cast<double>(kNsPerMs));
}

/// A second copy of a message, in memory of its own.
class CopiedData final : public ReceivedData::Owner {
 public:
  explicit CopiedData(std::span<const std::byte> bytes) : bytes_(bytes.begin(), bytes.end()) {}
  void release(const void*) noexcept override {}
  /// `wrong`: the place of a byte in which a bit turns over.
  [[nodiscard]] static ReceivedData of(std::span<const std::byte> bytes, std::optional<std::size_t> wrong = {}) {
    auto copy = std::make_shared<CopiedData>(bytes);
    if (wrong && *wrong < copy->bytes_.size()) copy->bytes_[*wrong] ^= std::byte{1};
    const std::span<const std::byte> copied = copy->bytes_;
    return {std::move(copy), copied};
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

FaultyReceiver::FaultyReceiver(std::shared_ptr<StagedReceiver> inner, std::uint64_t total_bytes,
                               std::shared_ptr<Faults> faults)
    : inner_(std::move(inner)), total_bytes_(total_bytes), faults_(std::move(faults)), draws_(faults_->draws()) {}

void FaultyReceiver::on_chunk(const ChunkHeader& header, ReceivedData data) noexcept {
  if (cancelled_ && stop_due_ns_ == 0) return;
  try {
    hold(header, std::move(data));
  } catch (const std::bad_alloc&) {
    faults_->counts().dropped.fetch_add(1);  // A lost chunk is what this lane is for.
  }
}

void FaultyReceiver::hold(const ChunkHeader& header, ReceivedData data) {
  const FaultScript& script = faults_->script();
  FaultCounts& counts = faults_->counts();
  const std::uint64_t number = chunks_++;
  counts.pieces.fetch_add(1);
  if (cancelled_) counts.late.fetch_add(1);
  if (draws_.draw(number, Purpose::drop) < script.drop) {
    counts.dropped.fetch_add(1);
    return;
  }
  const double refused_ms = kRefusedMs * script.no_resource;
  counts.refused.fetch_add(script.no_resource);
  const auto due_after = [&](Purpose purpose) {
    const double most_ms = script.reorder ? std::max(script.delay_ms, kShuffleMs) : script.delay_ms;
    return now_ns() + nanoseconds(refused_ms + most_ms * draws_.draw(number, purpose));
  };
  std::int64_t due_ns = due_after(Purpose::delay);
  if (!script.reorder) due_ns = last_due_ns_ = std::max(due_ns, last_due_ns_);
  if (draws_.draw(number, Purpose::duplicate) < script.duplicate) {
    held_.push_back({.due_ns = due_after(Purpose::again), .header = header, .data = CopiedData::of(data.bytes())});
    counts.duplicated.fetch_add(1);
  }
  if (draws_.draw(number, Purpose::corrupt) < script.corrupt) {
    const auto bytes = static_cast<double>(data.bytes().size());
    data = CopiedData::of(data.bytes(), static_cast<std::size_t>(draws_.draw(number, Purpose::where) * bytes));
    counts.corrupted.fetch_add(1);
  }
  if (!data.lent()) data = CopiedData::of(data.bytes());  // held beyond the callback
  held_.push_back({.due_ns = due_ns, .header = header, .data = std::move(data)});
}

bool FaultyReceiver::advance() noexcept {
  const std::int64_t now = now_ns();
  if (stop_due_ns_ != 0 && stop_due_ns_ <= now) {
    stop_due_ns_ = 0;
    held_.clear();
    inner_->cancel();
  }
  std::ranges::stable_sort(held_, {}, &Held::due_ns);
  std::size_t due = 0;
  for (; due < held_.size() && held_[due].due_ns <= now; ++due) {
    Held& chunk = held_[due];
    const auto& most = faults_->script().fail_after_bytes;
    if (most && taken_bytes_ >= *most) {
      faults_->counts().failed.fetch_add(1);
      fail({.code = Code::transport_failed,
            .message = "the script fails the lane after " + std::to_string(taken_bytes_) + " bytes"});
      break;
    }
    taken_bytes_ += chunk.header.length;
    inner_->on_chunk(chunk.header, std::move(chunk.data));
  }
  held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(std::min(due, held_.size())));
  if (!held_.empty()) faults_->alarm().ring_at(held_.front().due_ns);
  if (stop_due_ns_ != 0) faults_->alarm().ring_at(stop_due_ns_);
  return inner_->advance() || due != 0;
}

void FaultyReceiver::fail(Failure cause) noexcept {
  if (!failure_ && !cancelled_) failure_ = std::move(cause);
  held_.clear();
  if (stop_due_ns_ != 0) return;
  if (faults_->script().like_rc) {
    stop_due_ns_ = now_ns() + nanoseconds(faults_->script().error_after_ms);
  } else {
    inner_->cancel();
  }
}

void FaultyReceiver::cancel() noexcept {
  if (drained() || std::exchange(cancelled_, true)) return;
  const std::uint64_t moved = inner_->moved_bytes();
  if (moved != 0 && moved < total_bytes_) faults_->counts().midway.fetch_add(1);
  if (stop_due_ns_ != 0) return;
  if (faults_->script().like_rc) {
    stop_due_ns_ = now_ns() + nanoseconds(faults_->script().error_after_ms);
    faults_->alarm().ring_at(stop_due_ns_);
    return;
  }
  held_.clear();
  inner_->cancel();
}

bool FaultyReceiver::drained() const noexcept {
  return stop_due_ns_ == 0 && inner_->drained();
}

std::optional<Failure> FaultyReceiver::failure() const {
  return failure_ ? failure_ : inner_->failure();
}

}  // namespace kvlink::transport
