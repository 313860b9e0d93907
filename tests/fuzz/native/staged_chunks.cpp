// Chunks of a source on the staged lane: headers and bytes that it chose. Every byte of the stream is taken once and
// lands in its own block, nothing else is written, and all that UCX lent is given back.
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz.hpp"
#include "inline_copies.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/staged_receiver.hpp"
#include "kvlink/transport/waker.hpp"
#include "scattered.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::transport;

constexpr std::uint32_t kWindow = 4;
constexpr test::Scattered kBlocks{.block_bytes = 8, .blocks = 12, .moved = 6};
const AttemptId kAttempt{.handoff = {.epoch = {1}, .sequence = 7}, .attempt = 2};

class Lender final : public ReceivedData::Owner {
 public:
  void release(const void* /*data*/) noexcept override { ++released; }
  std::size_t released{0};
};

/// What the memory must hold, and which bytes of the stream have been taken.
struct Model {
  std::vector<std::byte> memory = std::vector<std::byte>(kBlocks.pool_bytes());
  std::array<bool, kBlocks.block_bytes * kBlocks.moved> there{};
  std::uint64_t covered{0};

  /// False if one of the bytes is there already, or is none of the stream.
  bool take(const plan::Plan& plan, std::uint64_t begin, fuzz::Bytes bytes) {
    if (bytes.empty() || begin > there.size() || bytes.size() > there.size() - begin) return false;
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      if (there[begin + at]) return false;
    }
    for (std::size_t at = 0; at < bytes.size(); ++at) there[begin + at] = true;
    covered += bytes.size();
    const LocalMemory into({{.base = memory.data(), .bytes = memory.size()}});
    plan.visit_target(begin, begin + bytes.size(), [&](const plan::StridedCopy& copy) {
      for (std::uint64_t run = 0; run < std::uint64_t{copy.inner} * copy.outer; ++run) {
        const auto from = run / copy.inner * copy.source_outer_stride + run % copy.inner * copy.source_inner_stride;
        const auto to = run / copy.inner * copy.target_outer_stride + run % copy.inner * copy.target_inner_stride;
        std::memcpy(into.at(0, copy.target_offset + to), bytes.data() + copy.source_offset + from, copy.run_bytes);
      }
    });
    return true;
  }
};

/// One receiver, and the source that sends to it.
struct Scene {
  static const Waker& waker() {
    static const Waker made;
    return made;
  }
  static const std::shared_ptr<const plan::Plan>& same_plan() {
    static const std::shared_ptr<const plan::Plan> made = kBlocks.plan(3);
    return made;
  }
  std::shared_ptr<const plan::Plan> plan = same_plan();
  std::vector<std::byte> memory = std::vector<std::byte>(kBlocks.pool_bytes());
  CopyThreads threads{1};
  std::shared_ptr<Lender> lender = std::make_shared<Lender>();
  ChunkRouter router;
  std::shared_ptr<StagedReceiver> receiver = StagedReceiver::create(
      plan, std::make_shared<LocalMemory>(std::vector<LocalRegion>{{.base = memory.data(), .bytes = memory.size()}}),
      kWindow, threads, waker());
  std::vector<std::vector<std::byte>> sent;  // lent until the end
  std::vector<ChunkHeader> waiting;          // arrived, and not looked at yet
  std::vector<std::size_t> bodies;           // of those
  std::uint32_t uncredited{0};
  Model model;
  bool stopped{false};
  bool attached{true};

  void send(const ChunkHeader& header, fuzz::Bytes raw_header, fuzz::Bytes body) {
    sent.emplace_back(body.begin(), body.end());
    router.deliver(raw_header, ReceivedData(lender, sent.back()));
    const auto read = ChunkHeader::decode(raw_header);
    if (!read || read->attempt != kAttempt || read->length != body.size() || !attached || stopped) return;
    HOLDS(read->stream_begin == header.stream_begin);
    waiting.push_back(*read);
    bodies.push_back(sent.size() - 1);
  }
  void advance() {
    const bool was_stopped = stopped;
    (void)receiver->advance();
    (void)receiver->advance();  // the first takes chunks, the second what has been copied of them
    if (!was_stopped) take_waiting();
    uncredited -= receiver->take_credits();
    HOLDS(receiver->failure().has_value() == (stopped && !was_cancelled));
  }
  void take_waiting() {
    // One more than the window fails it before any of them is looked at.
    stopped = uncredited + waiting.size() > kWindow;
    for (std::size_t at = 0; at < waiting.size() && !stopped; ++at) {
      stopped = !model.take(*plan, waiting[at].stream_begin, sent[bodies[at]]);
      if (!stopped) ++uncredited;
    }
    waiting.clear();
    bodies.clear();
  }
  bool was_cancelled{false};
};

ChunkHeader header_of(fuzz::Input& input) {
  ChunkHeader header{.attempt = kAttempt, .stream_begin = input.edgy(48), .length = input.edgy32(20)};
  const std::uint8_t other = input.byte();
  if (other >= 240) header.attempt.attempt += other;
  return header;
}

void step(Scene& scene, fuzz::Input& input) {
  const std::uint8_t what = input.byte();
  if (what < 160) {
    const ChunkHeader header = header_of(input);
    const auto encoded = header.encode();
    std::vector<std::byte> body(std::min<std::uint32_t>(header.length, 64), std::byte{input.byte()});
    scene.send(header, encoded, body);
  } else if (what < 176) {
    const fuzz::Bytes raw = input.bytes(ChunkHeader::encoded_bytes);
    const auto read = ChunkHeader::decode(raw);
    scene.send(read.value_or(ChunkHeader{}), raw, input.bytes(8));
  } else if (what < 240) {
    scene.advance();
  } else if (what < 248) {
    scene.receiver->cancel();
    scene.was_cancelled = scene.was_cancelled || !scene.stopped;
    scene.stopped = true;
  } else if (what < 252) {
    scene.router.detach(kAttempt);
    scene.attached = false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Scene scene;
  scene.sent.reserve(32);
  scene.router.attach(kAttempt, scene.receiver);
  while (!input.empty() && scene.sent.size() < 32) step(scene, input);
  scene.advance();
  HOLDS(scene.receiver->moved_bytes() <= scene.model.covered);
  if (!scene.stopped) {
    HOLDS(scene.memory == scene.model.memory);
    HOLDS(scene.receiver->moved_bytes() == scene.model.covered);
    HOLDS(scene.receiver->drained() == (scene.model.covered == scene.plan->total_bytes()));
  }
  scene.receiver->cancel();
  HOLDS(scene.receiver->drained());
  scene.router.detach(kAttempt);
  scene.receiver.reset();
  HOLDS(scene.lender->released == scene.sent.size());
  return 0;
}
