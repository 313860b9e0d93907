#include "kvlink/transport/staged_receiver.hpp"

#include <algorithm>
#include <deque>
#include <new>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/copy_piece.hpp"
#include "kvlink/transport/copy_staging.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/stream_coverage.hpp"

namespace kvlink::transport {
namespace {

constexpr const char* kRefusedRange = "the source sent bytes that are not in the plan, or twice";
constexpr const char* kNoMemory = "no memory to scatter a chunk";

/// One chunk from its arrival until it lies in the blocks.
class IncomingChunk final : public CopyPiece {
 public:
  IncomingChunk(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const LocalMemory> target, StreamRange range,
                ReceivedData data, const Waker& waker)
      : CopyPiece(waker), plan_(std::move(plan)), target_(std::move(target)), range_(range), data_(std::move(data)) {}

  [[nodiscard]] const StreamRange& range() const noexcept { return range_; }

 private:
  void copy() noexcept override { scatter(*plan_, range_.begin, range_.end, data_.bytes().data(), *target_); }

  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const LocalMemory> target_;
  StreamRange range_;
  ReceivedData data_;
};

class Receiver final : public StagedReceiver {
 public:
  Receiver(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const LocalMemory> target,
           std::uint32_t window_chunks, CopyThreads& copy_threads, const Waker& waker)
      : plan_(std::move(plan)),
        target_(std::move(target)),
        window_chunks_(window_chunks),
        copy_threads_(copy_threads),
        waker_(waker),
        accepted_(plan_->total_bytes()),
        scattered_(plan_->total_bytes()) {
    arrived_.reserve(window_chunks);
  }
  ~Receiver() override { stop(); }

  void start() noexcept override {}

  void on_chunk(const ChunkHeader& header, ReceivedData data) noexcept override {
    if (stopped_) return;
    if (arrived_.size() + scattering_.size() + credits_ >= window_chunks_) {
      overrun_ = true;  // told in words by `advance`: nothing is built inside a callback
      return;
    }
    if (data.lent()) {
      arrived_.emplace_back(header, std::move(data));  // reserved: never allocates
    } else {
      scatter_here(header, data.bytes());
    }
  }

  bool advance() noexcept override {
    const auto before = now_ns();
    bool any = take_scattered() || std::exchange(scattered_here_, false);
    if (refused_range_) fail(Code::protocol_error, kRefusedRange);
    if (no_memory_) fail(Code::out_of_memory, kNoMemory);
    if (overrun_) fail(Code::protocol_error, "the source sent more chunks than the window allows");
    try {
      any = scatter_arrived() || any;
    } catch (const std::bad_alloc&) {
      fail(Code::out_of_memory, kNoMemory);
    }
    if (any) post_ns_ += static_cast<std::uint64_t>(now_ns() - before);
    return any;
  }

  void cancel() noexcept override {
    stop();
    waker_.ring();  // copies that were called off will not, and the loop may be about to sleep
  }

  [[nodiscard]] bool drained() const noexcept override {
    const bool no_more = stopped_ || scattered_.complete();
    return no_more &&
           std::all_of(scattering_.begin(), scattering_.end(), [](const auto& chunk) { return chunk->settled(); });
  }

  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override { return scattered_.covered_bytes(); }
  [[nodiscard]] std::optional<Failure> failure() const override { return failure_; }
  [[nodiscard]] std::vector<StreamRange> missing() const override { return scattered_.missing(); }
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return post_ns_; }
  [[nodiscard]] std::uint32_t take_credits() noexcept override { return std::exchange(credits_, 0); }

 private:
  void stop() noexcept {
    stopped_ = true;
    arrived_.clear();
    for (const auto& chunk : scattering_) chunk->call_off();
  }

  void fail(Code code, std::string message) noexcept {
    if (!failure_ && !stopped_) failure_ = Failure{.code = code, .message = std::move(message)};
    stop();
  }

  /// Inside the callback, from where the transport received it: a copy for another thread to scatter would cost as
  /// much.
  void scatter_here(const ChunkHeader& header, std::span<const std::byte> bytes) noexcept {
    const StreamRange range{header.stream_begin, header.stream_begin + header.length};
    const auto before = now_ns();
    try {
      if (!accepted_.add(range)) {
        refused_range_ = true;
        return;
      }
      scatter(*plan_, range.begin, range.end, bytes.data(), *target_);
      if (scattered_.add(range)) ++credits_;
    } catch (const std::bad_alloc&) {
      no_memory_ = true;
    }
    scattered_here_ = true;
    post_ns_ += static_cast<std::uint64_t>(now_ns() - before);
  }

  bool take_scattered() noexcept {
    bool any = false;
    for (auto& chunk : scattering_) {
      if (!chunk->settled()) continue;
      if (chunk->copied() && scattered_.add(chunk->range()) && !stopped_) ++credits_;
      chunk.reset();
      any = true;
    }
    std::erase(scattering_, nullptr);
    return any;
  }

  bool scatter_arrived() {
    std::size_t taken = 0;
    for (auto& [header, data] : arrived_) {
      const StreamRange range{header.stream_begin, header.stream_begin + header.length};
      // The sum may wrap: then the end lies before the begin, and the coverage refuses it.
      if (!accepted_.add(range)) {
        fail(Code::protocol_error, kRefusedRange);
        return true;
      }
      auto chunk = std::make_shared<IncomingChunk>(plan_, target_, range, std::move(data), waker_);
      scattering_.push_back(chunk);
      if (!copy_threads_.submit(std::move(chunk))) {
        scattering_.pop_back();
        fail(Code::busy, "the queue of the copy threads is full");
        return true;
      }
      ++taken;
    }
    arrived_.clear();
    return taken != 0;
  }

  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const LocalMemory> target_;
  const std::uint32_t window_chunks_;
  CopyThreads& copy_threads_;
  const Waker& waker_;
  std::vector<std::pair<ChunkHeader, ReceivedData>> arrived_;  // inside the window, not yet checked
  std::vector<std::shared_ptr<IncomingChunk>> scattering_;
  StreamCoverage accepted_;
  StreamCoverage scattered_;
  std::uint32_t credits_{0};
  std::uint64_t post_ns_{0};
  bool overrun_{false};  // these three: found inside a callback, told by `advance`
  bool refused_range_{false};
  bool no_memory_{false};
  bool scattered_here_{false};  // since the last `advance`
  bool stopped_{false};
  std::optional<Failure> failure_;
};

}  // namespace

std::shared_ptr<StagedReceiver> StagedReceiver::create(std::shared_ptr<const plan::Plan> plan,
                                                       std::shared_ptr<const LocalMemory> target,
                                                       std::uint32_t window_chunks, CopyThreads& copy_threads,
                                                       const Waker& waker) {
  return std::make_shared<Receiver>(std::move(plan), std::move(target), window_chunks, copy_threads, waker);
}

}  // namespace kvlink::transport
