#include "kvlink/transport/staged_sender.hpp"

#include <algorithm>
#include <deque>
#include <new>
#include <string>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/transport/chunk_header.hpp"
#include "kvlink/transport/copy_piece.hpp"
#include "kvlink/transport/copy_staging.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/ucx/status.hpp"

namespace kvlink::transport {
namespace {

/// Where a node has fewer copy threads, the cores are few: a chunk that the progress thread gathers itself is still in
/// its core's cache when it is sent, and nobody has to be woken.
constexpr unsigned kThreadsWorthAHop = 3;

/// One chunk from gathering until UCX has let go of it. Owns all memory that either needs.
class OutgoingChunk final : public CopyPiece, public ucx::PendingRequests {
 public:
  OutgoingChunk(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const LocalMemory> source,
                ChunkPool::Chunk buffer, const ChunkHeader& header, const Waker& waker)
      : CopyPiece(waker),
        plan_(std::move(plan)),
        source_(std::move(source)),
        buffer_(std::move(buffer)),
        begin_(header.stream_begin),
        length_(header.length),
        header_(header.encode()) {}

  void start_send(ucx::Endpoint& endpoint) noexcept {
    endpoint.start_message(*this, header_, {buffer_.data(), length_});
  }
  [[nodiscard]] std::uint32_t length() const noexcept { return length_; }

 private:
  void copy() noexcept override { gather(*plan_, begin_, begin_ + length_, *source_, buffer_.data()); }

  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const LocalMemory> source_;
  ChunkPool::Chunk buffer_;
  std::uint64_t begin_;
  std::uint32_t length_;
  ChunkHeader::Encoded header_;
};

}  // namespace

struct StagedSender::State {
  std::shared_ptr<const plan::Plan> plan;
  std::shared_ptr<const LocalMemory> source;
  std::shared_ptr<ucx::Endpoint> endpoint;
  AttemptId attempt;
  std::shared_ptr<ChunkPool> chunks;
  std::uint64_t window_chunks;
  CopyThreads& copy_threads;
  const Waker& waker;

  std::uint64_t next{0};  // stream position of the next chunk to gather
  std::deque<std::shared_ptr<OutgoingChunk>> gathering{};
  std::deque<std::shared_ptr<OutgoingChunk>> sending{};
  std::uint64_t begun_chunks{0};
  std::uint64_t posted_chunks{0};
  std::uint64_t credited_chunks{0};
  std::uint64_t sent_bytes{0};
  std::uint64_t post_ns{0};
  bool started{false};
  bool stopped{false};
  std::optional<Failure> failure{};

  void stop() noexcept {
    stopped = true;
    for (const auto& chunk : gathering) chunk->call_off();
  }

  void fail(Failure cause) noexcept {
    if (!failure && !stopped) failure = std::move(cause);
    stop();
  }

  bool take_finished() noexcept {
    bool any = false;
    while (!sending.empty() && sending.front()->outstanding() == 0) {
      const auto& chunk = *sending.front();
      if (chunk.status() == UCS_OK) {
        sent_bytes += chunk.length();
      } else {
        fail(ucx::failure_of(endpoint->worker().context().library(), chunk.status(),
                             "send a chunk to " + endpoint->peer()));
      }
      sending.pop_front();
      any = true;
    }
    return any;
  }

  bool send_gathered() noexcept {
    bool any = false;
    while (!gathering.empty() && gathering.front()->settled()) {
      auto chunk = std::move(gathering.front());
      gathering.pop_front();
      any = true;
      if (stopped || !chunk->copied()) continue;
      const auto before = now_ns();
      chunk->start_send(*endpoint);
      post_ns += static_cast<std::uint64_t>(now_ns() - before);
      ++posted_chunks;
      sending.push_back(std::move(chunk));
    }
    return any;
  }

  /// Makes the next chunk, which ends up in `gathering`. False when it has to wait.
  bool gather_next(bool here) {
    ChunkPool::Chunk buffer = chunks->borrow();
    if (!buffer) return false;  // a chunk that comes back comes with a turn of the loop
    const auto length =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(chunks->chunk_bytes(), plan->total_bytes() - next));
    const ChunkHeader header{.attempt = attempt, .stream_begin = next, .length = length};
    auto chunk = std::make_shared<OutgoingChunk>(plan, source, std::move(buffer), header, waker);
    gathering.push_back(chunk);
    if (here) {
      chunk->run(*chunk->claim());  // nobody else knows of it yet
    } else if (!copy_threads.submit(std::move(chunk))) {
      gathering.pop_back();
      return false;
    }
    next += length;
    ++begun_chunks;
    return true;
  }

  bool gather_more() {
    const bool here = copy_threads.threads() < kThreadsWorthAHop;
    bool any = false;
    while (!stopped && next < plan->total_bytes() && begun_chunks - credited_chunks < window_chunks) {
      if (!gather_next(here)) break;
      any = true;
      if (here) break;  // and let the others have their turn
    }
    return any;
  }
};

StagedSender::StagedSender(std::shared_ptr<const plan::Plan> plan, std::shared_ptr<const LocalMemory> source,
                           std::shared_ptr<ucx::Endpoint> endpoint, const AttemptId& attempt,
                           std::shared_ptr<ChunkPool> chunks, std::uint32_t window_chunks, CopyThreads& copy_threads,
                           const Waker& waker)
    : state_(new State{.plan = std::move(plan),
                       .source = std::move(source),
                       .endpoint = std::move(endpoint),
                       .attempt = attempt,
                       .chunks = std::move(chunks),
                       .window_chunks = window_chunks,
                       .copy_threads = copy_threads,
                       .waker = waker}) {}

StagedSender::~StagedSender() {
  state_->stop();
}

void StagedSender::start() noexcept {
  state_->started = true;
  advance();
}

bool StagedSender::advance() noexcept {
  if (!state_->started) return false;
  if (!state_->stopped && state_->endpoint->failed()) {
    if (auto cause = state_->endpoint->failure()) state_->fail(std::move(*cause));
  }
  bool any = state_->take_finished();
  any = state_->send_gathered() || any;
  try {
    if (state_->gather_more()) any = state_->send_gathered() || true;
  } catch (const std::bad_alloc&) {
    state_->fail({.code = Code::out_of_memory, .message = "gather a chunk for " + state_->endpoint->peer()});
  }
  return any;
}

void StagedSender::credit(std::uint32_t chunks) noexcept {
  if (chunks > state_->posted_chunks - state_->credited_chunks) {
    state_->fail({.code = Code::protocol_error,
                  .message = state_->endpoint->peer() + " gave credit for chunks that it was never sent"});
    return;
  }
  state_->credited_chunks += chunks;
}

void StagedSender::cancel() noexcept {
  state_->stop();
}

bool StagedSender::drained() const noexcept {
  return finished() || (state_->stopped && std::all_of(state_->gathering.begin(), state_->gathering.end(),
                                                       [](const auto& chunk) { return chunk->settled(); }));
}

bool StagedSender::finished() const noexcept {
  return state_->started && !state_->stopped && state_->sent_bytes == state_->plan->total_bytes();
}

const AttemptId& StagedSender::attempt() const noexcept {
  return state_->attempt;
}
std::uint64_t StagedSender::sent_bytes() const noexcept {
  return state_->sent_bytes;
}
std::optional<Failure> StagedSender::failure() const {
  return state_->failure;
}
std::uint64_t StagedSender::post_ns() const noexcept {
  return state_->post_ns;
}

}  // namespace kvlink::transport
