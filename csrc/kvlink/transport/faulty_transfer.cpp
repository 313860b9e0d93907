#include "kvlink/transport/faulty_transfer.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::transport {
namespace {

using Purpose = FaultDraws::Purpose;

/// A piece that was refused for want of resources is tried again so much later.
constexpr std::int64_t kRetryNs = kNsPerMs / 2;

[[nodiscard]] std::int64_t nanoseconds(double ms) noexcept {
  return static_cast<std::int64_t>(ms * static_cast<double>(kNsPerMs));
}

}  // namespace

struct FaultyTransfer::Piece {
  std::shared_ptr<const plan::Plan> plan;
  std::vector<StreamRange> ranges;  // of the whole plan's stream, ascending
  std::uint64_t number{};
  std::int64_t due_ns{};
  std::uint32_t refusals{};
  bool drop{};
  bool again{};  // a second copy of it is to come
  bool arrived{};
  bool over{};
  std::shared_ptr<Transfer> run{};

  [[nodiscard]] bool waits() const noexcept { return !over && !run; }
};

FaultyTransfer::FaultyTransfer(std::shared_ptr<const plan::Plan> plan, Lane lane,
                               std::shared_ptr<const LocalMemory> target, std::shared_ptr<Faults> faults)
    : plan_(std::move(plan)),
      lane_(std::move(lane)),
      target_(std::move(target)),
      faults_(std::move(faults)),
      draws_(faults_->draws()) {
  const plan::Template& geometry = plan_->geometry();
  // Not owned: `plan_` keeps the template as long as any piece's plan lives.
  const std::shared_ptr<const plan::Template> shared(plan_, &geometry);
  const std::size_t groups = geometry.groups().size();
  for (std::size_t group = 0; group < groups; ++group) {
    if (geometry.token_bytes(group) == 0) continue;
    for (const plan::BlockPair& pair : plan_->pairs(group)) {
      std::vector<std::vector<plan::BlockPair>> only(groups);
      only[group].push_back(pair);
      auto piece = std::make_unique<Piece>();
      piece->plan = std::make_shared<plan::Plan>(shared, std::move(only));
      piece->number = pieces_.size();
      pieces_.push_back(std::move(piece));
    }
  }
  std::uint64_t position = 0;
  for (const plan::Op& op : geometry.ops()) {
    const auto token_bytes = std::uint64_t{op.heads} * op.dims * op.element_bytes;
    for (const auto& piece : pieces_) {
      const auto pairs = piece->plan->pairs(op.group);
      if (pairs.empty()) continue;
      const std::uint64_t end = position + pairs.front().tokens * token_bytes;
      piece->ranges.push_back({position, end});
      position = end;
    }
  }
  faults_->counts().pieces.fetch_add(pieces_.size());
}

FaultyTransfer::~FaultyTransfer() = default;

void FaultyTransfer::start() noexcept {
  started_ = true;
  schedule();
  advance();
}

void FaultyTransfer::schedule() {
  const FaultScript& script = faults_->script();
  const std::int64_t now = now_ns();
  std::vector<std::int64_t> due;
  for (const auto& piece : pieces_) {
    due.push_back(now + nanoseconds(script.delay_ms * draws_.draw(piece->number, Purpose::delay)));
    piece->refusals = script.no_resource;
    piece->drop = draws_.draw(piece->number, Purpose::drop) < script.drop;
    piece->again = !piece->drop && draws_.draw(piece->number, Purpose::duplicate) < script.duplicate;
  }
  if (script.reorder) {
    std::ranges::sort(pieces_, {}, [this](const auto& piece) { return draws_.draw(piece->number, Purpose::order); });
  }
  std::ranges::sort(due);
  for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i]->due_ns = due[i];
}

void FaultyTransfer::fail(Failure cause) noexcept {
  if (!failure_ && !cancelled_) failure_ = std::move(cause);
  stopped_ = true;
  for (const auto& piece : pieces_) {
    if (piece->run) piece->run->cancel();
  }
}

void FaultyTransfer::fail_later(std::int64_t now, Failure cause) {
  const FaultScript& script = faults_->script();
  if (!script.like_rc) return fail(std::move(cause));
  if (error_) return;
  error_ = std::move(cause);
  error_due_ns_ = now + nanoseconds(script.error_after_ms);
}

void FaultyTransfer::post(Piece& piece, std::int64_t now) {
  const FaultScript& script = faults_->script();
  FaultCounts& counts = faults_->counts();
  if (piece.refusals > 0) {
    --piece.refusals;
    piece.due_ns = now + kRetryNs;
    counts.refused.fetch_add(1);
    return;
  }
  if (script.fail_after_bytes && posted_bytes_ >= *script.fail_after_bytes) {
    piece.over = true;
    counts.failed.fetch_add(1);
    return fail_later(now, {.code = Code::transport_failed,
                            .message = "the script fails the lane after " + std::to_string(posted_bytes_) + " bytes"});
  }
  if (piece.drop) {
    piece.over = true;
    counts.dropped.fetch_add(1);
    // Another lane just ends short of it; one like RC tells an error, seconds later.
    if (script.like_rc) fail_later(now, {.code = Code::transport_failed, .message = "the script dropped a piece"});
    return;
  }
  if (cancelled_) counts.late.fetch_add(1);
  posted_bytes_ += piece.plan->total_bytes();
  piece.run = lane_(piece.plan);
  piece.run->start();
}

void FaultyTransfer::corrupt(const Piece& piece) noexcept {
  if (draws_.draw(piece.number, Purpose::corrupt) >= faults_->script().corrupt) return;
  const auto bytes = piece.plan->total_bytes();
  const auto at = static_cast<std::uint64_t>(draws_.draw(piece.number, Purpose::where) * static_cast<double>(bytes));
  piece.plan->visit(at, at + 1, [this](const plan::StridedCopy& copy) noexcept {
    *target_->at(copy.target_region, copy.target_offset) ^= std::byte{1};
  });
  faults_->counts().corrupted.fetch_add(1);
}

bool FaultyTransfer::advance_piece(Piece& piece, std::int64_t now) {
  if (piece.over) return false;
  if (piece.waits()) {
    if (stopped_ || piece.due_ns > now) return false;
    post(piece, now);
    if (!piece.run) return true;
  }
  const bool busy = piece.run->advance();
  if (!piece.run->drained()) return busy;
  if (auto cause = piece.run->failure()) fail(std::move(*cause));
  const bool whole = piece.run->moved_bytes() == piece.plan->total_bytes();
  post_ns_ += piece.run->post_ns();
  if (whole) corrupt(piece);
  if (whole && !std::exchange(piece.arrived, true)) moved_bytes_ += piece.plan->total_bytes();
  piece.run.reset();
  if (std::exchange(piece.again, false) && whole && !stopped_) {
    faults_->counts().duplicated.fetch_add(1);
    piece.due_ns = now + nanoseconds(faults_->script().delay_ms * draws_.draw(piece.number, Purpose::again));
  } else {
    piece.over = true;
  }
  return true;
}

bool FaultyTransfer::advance() noexcept {
  if (!started_) return false;
  const std::int64_t now = now_ns();
  bool busy = false;
  try {
    if (error_due_ns_ != 0 && error_due_ns_ <= now) {
      error_due_ns_ = 0;
      fail(std::move(*error_));
      busy = true;
    }
    for (const auto& piece : pieces_) busy = advance_piece(*piece, now) || busy;
  } catch (const Error& error) {
    fail({.code = error.code(), .message = error.what()});
  } catch (const std::bad_alloc&) {
    fail({.code = Code::out_of_memory, .message = "no memory for a piece"});
  }
  set_alarm();
  return busy;
}

void FaultyTransfer::set_alarm() noexcept {
  if (error_due_ns_ != 0) faults_->alarm().ring_at(error_due_ns_);
  if (stopped_) return;
  for (const auto& piece : pieces_) {
    if (piece->waits()) faults_->alarm().ring_at(piece->due_ns);
  }
}

void FaultyTransfer::cancel() noexcept {
  if (drained() || std::exchange(cancelled_, true)) return;
  if (moved_bytes_ != 0 && moved_bytes_ < plan_->total_bytes()) faults_->counts().midway.fetch_add(1);
  if (faults_->script().like_rc && started_) return;  // What was posted stays posted.
  stopped_ = true;
  error_due_ns_ = 0;
  for (const auto& piece : pieces_) {
    if (piece->run) piece->run->cancel();
  }
}

bool FaultyTransfer::drained() const noexcept {
  if (!started_) return stopped_;
  if (error_due_ns_ != 0) return false;
  return std::ranges::all_of(pieces_,
                             [this](const auto& piece) { return piece->over || (piece->waits() && stopped_); });
}

std::vector<StreamRange> FaultyTransfer::missing() const {
  std::vector<StreamRange> ranges;
  for (const auto& piece : pieces_) {
    if (!piece->arrived) ranges.insert(ranges.end(), piece->ranges.begin(), piece->ranges.end());
  }
  std::ranges::sort(ranges, {}, &StreamRange::begin);
  return ranges;
}

}  // namespace kvlink::transport
