#include "kvlink/transport/get_transfer.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/error.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/stream_coverage.hpp"
#include "kvlink/transport/ucx/status.hpp"

namespace kvlink::transport {
namespace {

// The grain of completion: bytes are reported as arrived a slice at a time.
constexpr std::uint64_t kSliceBytes = std::uint64_t{1} << 20;

/// The gets of one slice of the stream.
class GetSlice final : public ucx::PendingRequests {
 public:
  explicit GetSlice(StreamRange range) : range_(range) {}
  [[nodiscard]] const StreamRange& range() const noexcept { return range_; }

 private:
  StreamRange range_;
};

/// The runs of one slice, handed out one at a time.
class RunCursor {
 public:
  struct Run {
    std::uint32_t source_region;
    std::uint32_t target_region;
    std::uint64_t source_offset;
    std::uint64_t target_offset;
    std::uint64_t bytes;
  };

  void load(const plan::Plan& plan, StreamRange range) {
    copies_.clear();
    copy_ = 0;
    inner_ = 0;
    outer_ = 0;
    plan.visit(range.begin, range.end, [this](const plan::StridedCopy& copy) { copies_.push_back(copy); });
  }
  [[nodiscard]] bool empty() const noexcept { return copy_ == copies_.size(); }

  [[nodiscard]] Run next() noexcept {
    const plan::StridedCopy& copy = copies_[copy_];
    const Run run{copy.source_region, copy.target_region,
                  copy.source_offset + inner_ * copy.source_inner_stride + outer_ * copy.source_outer_stride,
                  copy.target_offset + inner_ * copy.target_inner_stride + outer_ * copy.target_outer_stride,
                  copy.run_bytes};
    if (++inner_ == copy.inner) {
      inner_ = 0;
      if (++outer_ == copy.outer) {
        outer_ = 0;
        ++copy_;
      }
    }
    return run;
  }

 private:
  std::vector<plan::StridedCopy> copies_;
  std::size_t copy_{0};
  std::uint32_t inner_{0};
  std::uint32_t outer_{0};
};

class GetTransfer final : public Transfer {
 public:
  GetTransfer(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const GetSource> source,
              std::shared_ptr<const LocalMemory> target, const GetLimits& limits)
      : plan_(std::move(plan)),
        source_(std::move(source)),
        target_(std::move(target)),
        limits_(limits),
        arrived_(plan_->total_bytes()) {}

  void start() noexcept override {
    started_ = true;
    advance();
  }

  bool advance() noexcept override {
    if (!started_) return false;
    try {
      const bool took = take_finished();
      const bool posted = post();
      return took || posted;
    } catch (const std::bad_alloc&) {
      fail({.code = Code::out_of_memory, .message = "no memory to post gets from " + source_->endpoint->peer()});
      return true;
    }
  }

  void cancel() noexcept override {
    stopped_ = true;
    source_->endpoint->worker().wake();  // nothing may be outstanding, so that nothing else would
  }

  [[nodiscard]] bool drained() const noexcept override {
    return (stopped_ || (started_ && next_ == plan_->total_bytes() && runs_.empty())) &&
           std::all_of(slices_.begin(), slices_.end(), [](const auto& slice) { return slice->outstanding() == 0; });
  }

  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override { return arrived_.covered_bytes(); }
  [[nodiscard]] std::optional<Failure> failure() const override { return failure_; }
  [[nodiscard]] std::vector<StreamRange> missing() const override { return arrived_.missing(); }
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return post_ns_; }

 private:
  void fail(Failure cause) noexcept {
    if (!failure_ && !stopped_) failure_ = std::move(cause);
    stopped_ = true;
  }

  [[nodiscard]] bool posting(const GetSlice& slice) const noexcept {
    return !runs_.empty() && &slice == slices_.back().get();
  }

  bool take_finished() {
    bool any = false;
    for (auto& slice : slices_) {
      if (slice->status() != UCS_OK) {
        fail(ucx::failure_of(source_->endpoint->worker().context().library(), slice->status(),
                             "get from " + source_->endpoint->peer()));
      }
      if (slice->outstanding() != 0 || posting(*slice)) continue;
      if (slice->status() == UCS_OK) any = arrived_.add(slice->range()) || any;
      slice.reset();
    }
    std::erase(slices_, nullptr);
    return any;
  }

  [[nodiscard]] std::uint64_t outstanding_ops() const noexcept {
    std::uint64_t count = 0;
    for (const auto& slice : slices_) count += slice->outstanding();
    return count;
  }

  /// Whether a slice is there to post from.
  bool load_slice() {
    if (!runs_.empty()) return true;
    if (next_ == plan_->total_bytes()) return false;
    if ((slices_.size() + 1) * kSliceBytes > std::max(limits_.window_bytes, kSliceBytes)) return false;
    const StreamRange range{next_, next_ + std::min(kSliceBytes, plan_->total_bytes() - next_)};
    slices_.push_back(std::make_shared<GetSlice>(range));
    runs_.load(*plan_, range);
    next_ = range.end;
    return true;
  }

  bool post() {
    if (stopped_) return false;
    const auto before = now_ns();
    const auto turn_end = before + static_cast<std::int64_t>(limits_.turn_ns);
    auto room = limits_.window_ops - std::min<std::uint64_t>(outstanding_ops(), limits_.window_ops);
    room = std::min<std::uint64_t>(room, limits_.ops_per_turn);
    bool any = false;
    while (!stopped_ && room > 0 && load_slice()) {
      post_one(runs_.next(), *slices_.back());
      any = true;
      --room;
      if (now_ns() >= turn_end) break;
    }
    post_ns_ += static_cast<std::uint64_t>(now_ns() - before);
    return any;
  }

  void post_one(const RunCursor::Run& run, GetSlice& slice) noexcept {
    ucx::Endpoint& endpoint = *source_->endpoint;
    const std::uint64_t bytes = source_->region_bytes[run.source_region];
    if (endpoint.raw() == nullptr || endpoint.failed()) {
      return fail(endpoint.failure().value_or(
          Failure{.code = Code::peer_lost, .message = "get from " + endpoint.peer() + ": the endpoint is closed"}));
    }
    if (run.source_offset > bytes || run.bytes > bytes - run.source_offset) {
      return fail({.code = Code::protocol_error, .message = "a run lies outside of " + endpoint.peer() + "'s region"});
    }
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &ucx::PendingRequests::on_complete;
    param.user_data = static_cast<ucx::PendingRequests*>(&slice);
    slice.started(endpoint.worker(),
                  endpoint.call().get_nbx(endpoint.raw(), target_->at(run.target_region, run.target_offset), run.bytes,
                                          source_->region_addresses[run.source_region] + run.source_offset,
                                          source_->keys[run.source_region]->raw(), &param));
  }

  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const GetSource> source_;
  std::shared_ptr<const LocalMemory> target_;
  const GetLimits limits_;
  StreamCoverage arrived_;
  std::uint64_t next_{0};                          // stream position of the next slice
  RunCursor runs_;                                 // what is left to post of the last slice
  std::vector<std::shared_ptr<GetSlice>> slices_;  // not yet taken; at most window_bytes / kSliceBytes
  std::uint64_t post_ns_{0};
  bool started_{false};
  bool stopped_{false};
  std::optional<Failure> failure_;
};

}  // namespace

std::shared_ptr<const GetSource> make_get_source(std::shared_ptr<ucx::Endpoint> endpoint,
                                                 std::span<const RemoteRegion> regions) {
  if (!endpoint->worker().context().one_sided()) {
    throw Error(Code::lane_unavailable,
                "get from " + endpoint->peer() + ": this node's UCX offers no one-sided access");
  }
  if (!endpoint->reads_remote_memory()) {
    throw Error(Code::lane_unavailable, "get from " + endpoint->peer() + ": UCX would emulate it over \"" +
                                            endpoint->transports() + "\"; it needs CMA on one host, or RDMA");
  }
  auto source = std::make_shared<GetSource>();
  source->endpoint = std::move(endpoint);
  for (const RemoteRegion& region : regions) {
    if (region.bytes > std::numeric_limits<std::uint64_t>::max() - region.address) {
      throw Error(Code::protocol_error, source->endpoint->peer() + " described a region that wraps around");
    }
    source->keys.push_back(std::make_shared<ucx::RemoteKey>(source->endpoint, region.packed_key));
    source->region_addresses.push_back(region.address);
    source->region_bytes.push_back(region.bytes);
  }
  return source;
}

std::shared_ptr<Transfer> make_get_transfer(std::shared_ptr<const plan::Plan> plan,
                                            std::shared_ptr<const GetSource> source,
                                            std::shared_ptr<const LocalMemory> target, const GetLimits& limits) {
  return std::make_shared<GetTransfer>(std::move(plan), std::move(source), std::move(target), limits);
}

}  // namespace kvlink::transport
