// Both books of a node without a network: peers at the other end of a socket pair, and transfers that do what a test
// says.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvlink/clock.hpp"
#include "kvlink/handoff/offer_book.hpp"
#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/transport/staged_sender.hpp"

namespace kvlink::test {

/// What the books run on: the project's table, or what `main` makes of it.
inline std::vector<handoff::Row> books_table(std::begin(handoff::kTransitions), std::end(handoff::kTransitions));

inline constexpr std::int64_t kSecond = 1'000'000'000;
inline constexpr std::uint64_t kTokens = 2;  // of every handoff, one a block
inline constexpr std::uint64_t kBlockBytes = 64;

/// A transfer that moves nothing by itself.
class ScriptedTransfer final : public transport::Transfer {
 public:
  explicit ScriptedTransfer(std::uint64_t total) : total_(total) {}
  void start() noexcept override {}
  bool advance() noexcept override { return false; }
  void cancel() noexcept override { cancelled = true; }
  [[nodiscard]] bool drained() const noexcept override { return done || broken || (cancelled && !slow); }
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept override { return done ? total_ : 0; }
  [[nodiscard]] std::optional<Failure> failure() const override {
    return broken ? std::optional(Failure{Code::transport_failed, "scripted"}) : std::nullopt;
  }
  [[nodiscard]] std::vector<transport::StreamRange> missing() const override { return {}; }
  [[nodiscard]] std::uint64_t post_ns() const noexcept override { return 0; }

  bool slow{false};  // goes on writing for a while after it was cancelled
  bool done{false};
  bool broken{false};
  bool cancelled{false};
  std::shared_ptr<const transport::LocalMemory> memory{};  // what a lane would write

 private:
  std::uint64_t total_;
};

/// The transfers that were made, oldest first.
inline std::vector<std::shared_ptr<ScriptedTransfer>>& transfers() {
  static std::vector<std::shared_ptr<ScriptedTransfer>> made;
  return made;
}

/// How many senders were made since the last SourceSide began.
inline std::size_t& senders_made() {
  static std::size_t made = 0;
  return made;
}

/// One op of whole blocks; with `empty` a source that delivers nothing.
inline std::shared_ptr<const plan::Template> geometry(bool empty = false) {
  plan::Op op;
  op.dims = static_cast<std::uint32_t>(kBlockBytes);
  op.source = {.region = 0,
               .offset = 0,
               .block_stride = kBlockBytes,
               .token_stride = kBlockBytes,
               .head_stride = kBlockBytes,
               .dim_stride = 1};
  op.target = op.source;
  plan::GroupGeometry group;
  group.name = "full";
  group.source_block_tokens = group.target_block_tokens = 1;
  group.source_num_blocks = group.target_num_blocks = 8;
  const std::vector<std::uint64_t> sizes{8 * kBlockBytes};
  return std::make_shared<const plan::Template>(empty ? std::vector<plan::Op>{} : std::vector{op}, std::vector{group},
                                                std::vector<std::string>{"layer"}, sizes, sizes);
}

/// Does all of `events`, in each of their orders, to a new side each time.
template <class Side>
void in_every_order(const std::function<std::unique_ptr<Side>()>& make,
                    const std::vector<std::function<void(Side&)>>& events, const std::function<void(Side&)>& check) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), 0U);
  do {
    const auto side = make();
    for (const std::size_t event : order) {
      events[event](*side);
      CHECK(!side->handle->released() || side->handle->has_outcome());
      CHECK(side->ended() <= 1);
    }
    check(*side);
  } while (std::next_permutation(order.begin(), order.end()));
}

struct Message {
  handoff::Kind kind{};
  AttemptId attempt;
  std::vector<std::byte> body;
};

/// One peer: what the books see of it, and its own end of the connection.
struct Remote {
  handoff::PeerPtr peer = std::make_shared<handoff::Peer>();
  std::unique_ptr<handoff::Channel> end;

  Remote(handoff::PeerRole role, const std::vector<transport::Lane>& lanes, bool empty = false) {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    peer->role = role;
    peer->state = handoff::PeerState::ready;
    peer->name = "other";
    peer->layout_template = geometry(empty);
    peer->channel = std::make_unique<handoff::Channel>(ends[0], handoff::kNewestDialect);
    peer->reach = handoff::Reach::open({}, lanes, false);
    end = std::make_unique<handoff::Channel>(ends[1], handoff::kNewestDialect);
  }

  /// What the books have sent since the last call.
  [[nodiscard]] std::vector<Message> received() {
    std::vector<Message> messages;
    if (peer->channel) CHECK(peer->channel->flush());
    (void)end->receive([&](const handoff::Header& header, std::span<const std::byte> body) {
      messages.push_back({.kind = header.kind, .attempt = header.attempt, .body = {body.begin(), body.end()}});
    });
    return messages;
  }
  [[nodiscard]] std::size_t count(handoff::Kind kind) {
    const auto messages = received();
    return static_cast<std::size_t>(std::ranges::count(messages, kind, &Message::kind));
  }
  void lose() {
    peer->state = handoff::PeerState::lost;
    peer->lost = Failure{Code::peer_lost, "scripted"};
  }
};

/// What the books of one node share, and how many handoffs ended.
struct Node {
  std::vector<std::byte> memory = std::vector<std::byte>(8 * kBlockBytes, std::byte{7});  // before what reads it
  handoff::Services services;
  const std::int64_t start = now_ns();  // the tests' clock begins here

  Node() {
    services.epoch = {1};
    services.bells = std::make_shared<handoff::Bells>();
    services.router = std::make_shared<transport::ChunkRouter>();
    services.memory = std::make_shared<transport::LocalMemory>(
        std::vector<transport::LocalRegion>{{.base = memory.data(), .bytes = memory.size()}});
    services.copy_threads = std::make_unique<transport::CopyThreads>(1);
    services.holds = std::make_shared<handoff::Holds>(std::vector<handoff::Group>{
        {.name = "full", .num_blocks = 8, .block_tokens = 1, .window = 0, .slots = false, .pool = 0}});
  }
  [[nodiscard]] std::uint64_t ended() const { return services.counters.succeeded + services.counters.failed; }
  [[nodiscard]] std::uint64_t stale() const { return services.counters.stale_messages; }
};

inline const handoff::BlockTables kBlocks{{3, 5}};

/// The source side of a node, with one offer.
struct SourceSide : Node {
  handoff::OfferBook book;
  HandoffId id{.epoch = {1}, .sequence = 7};
  std::shared_ptr<handoff::Handoff> handle;

  explicit SourceSide(std::span<const handoff::Row> table) : book(services, table) { senders_made() = 0; }

  void offer(std::uint32_t readers = 1, std::int64_t ttl_s = 10, std::int64_t cap_s = 300,
             transport::Integrity integrity = transport::Integrity::none) {
    handle = std::make_shared<handoff::Handoff>(handoff::Role::offer, AttemptId{.handoff = id, .attempt = 0}, "",
                                                handoff::State::offered, services.bells);
    services.holds->acquire_shared(kBlocks);
    ++services.counters.live;
    book.add({.handle = handle,
              .blocks = kBlocks,
              .num_tokens = kTokens,
              .expires_ns = start + ttl_s * kSecond,
              .ttl_ms = ttl_s * 1000,
              .cap_ns = start + cap_s * kSecond,
              .readers = readers,
              .integrity = integrity,
              .payload = {}});
    (void)book.turn(start);
  }
  [[nodiscard]] AttemptId attempt(std::uint32_t number) const { return {.handoff = id, .attempt = number}; }
  void claim(const Remote& reader, std::uint32_t number, std::uint64_t tokens = kTokens,
             transport::Integrity integrity = transport::Integrity::none) {
    book.on_claim(reader.peer, attempt(number),
                  {.lane = transport::Lane::mapped,
                   .first_token = 0,
                   .end_token = tokens,
                   .remaining_ms = 5000,
                   .integrity = integrity});
  }
  /// Both blocks of the offer.
  void check(const Remote& reader, std::uint32_t number) {
    book.on_check(reader.peer, attempt(number),
                  {.pieces = {{{.block = 3, .token = 0, .tokens = 1}, {.block = 5, .token = 0, .tokens = 1}}}});
  }
};

/// The target side of a node, with one pull over one or several sources.
struct TargetSide : Node {
  handoff::PullBook book;
  std::shared_ptr<handoff::Handoff> handle;
  std::vector<handoff::PartRequest> parts;

  explicit TargetSide(std::span<const handoff::Row> table, const handoff::WindowLimits& window = {})
      : book(services, window, table) {
    transfers().clear();
  }

  void pull(const std::vector<handoff::PeerPtr>& peers, std::optional<transport::Lane> lane = std::nullopt,
            transport::Integrity integrity = transport::Integrity::none) {
    for (const auto& peer : peers) {
      const auto number = static_cast<std::uint32_t>(parts.size() + 1);
      parts.push_back({.attempt = {.handoff = {.epoch = {9}, .sequence = 7}, .attempt = number}, .peer = peer});
    }
    handle = std::make_shared<handoff::Handoff>(handoff::Role::pull, parts.front().attempt, "",
                                                handoff::State::connecting, services.bells);
    services.holds->acquire_exclusive(kBlocks);
    ++services.counters.live;
    book.submit({.handle = handle,
                 .parts = parts,
                 .blocks = kBlocks,
                 .written = kBlocks,
                 .num_tokens = kTokens,
                 .skip_tokens = 0,
                 .submitted_ns = start,
                 .deadline_ns = start + 10 * kSecond,
                 .lane = lane,
                 .integrity = integrity});
  }
  void grant(std::size_t part, std::uint32_t lease_ms = 60'000) { grant_from(parts[part].peer, part, lease_ms); }
  void grant_from(const handoff::PeerPtr& peer, std::size_t part, std::uint32_t lease_ms = 60'000) {
    grant_summed(peer, part, transport::Integrity::none, lease_ms);
  }
  void grant_summed(const handoff::PeerPtr& peer, std::size_t part, transport::Integrity integrity,
                    std::uint32_t lease_ms = 60'000) {
    book.on_grant(
        peer, parts[part].attempt,
        {.remaining_ms = lease_ms, .num_tokens = kTokens, .integrity = integrity, .payload = {}, .blocks = {{0, 1}}});
  }
  /// What a source says whose blocks hold what this side's do, but for a bit of the cells that are `wrong`.
  void sums(const handoff::PeerPtr& peer, std::size_t part, std::size_t wrong_from = 2, std::size_t wrong_to = 2) {
    const std::vector<std::byte> block(kBlockBytes, std::byte{7});
    const std::span<const std::byte> piece(block);
    const auto sum = static_cast<std::uint32_t>(transport::sum_of({&piece, 1}, transport::Integrity::crc32c));
    std::vector<std::uint32_t> both{sum, sum};
    for (std::size_t cell = wrong_from; cell < wrong_to; ++cell) both[cell] ^= 1U;
    book.on_sums(peer, parts[part].attempt, {.first_byte = 0, .bytes = std::as_bytes(std::span(both))});
  }
  void valid(std::size_t part) { book.on_valid(parts[part].peer, parts[part].attempt); }
  void turn() { (void)book.turn(start); }
};

}  // namespace kvlink::test

namespace kvlink::handoff {

// The seam to the lanes: a reach leads wherever the test says, by transfers that do what the test says.
Reach Reach::open(SourceFacts /*facts*/, const std::vector<transport::Lane>& wanted, bool /*has_ucx*/) {
  Reach reach;
  reach.lanes_ = wanted;
  return reach;
}
Reach Reach::to_claimant(std::vector<std::byte> /*ucx_address*/, bool /*same_host*/) {
  return {};
}
std::string Reach::why_not(transport::Lane /*lane*/) const {
  return "scripted";
}
Reach::Started Reach::make_transfer(transport::Lane /*lane*/, std::shared_ptr<const plan::Plan> plan,
                                    const std::shared_ptr<const transport::LocalMemory>& memory, Services& /*services*/,
                                    const std::string& /*peer*/) {
  auto made = std::make_shared<test::ScriptedTransfer>(plan->total_bytes());
  made->memory = memory;
  test::transfers().push_back(made);
  return {made, nullptr};
}
std::shared_ptr<transport::StagedSender> Reach::make_sender(std::shared_ptr<const plan::Plan> plan,
                                                            const AttemptId& attempt, Services& services,
                                                            const std::string& /*peer*/,
                                                            std::span<const std::byte> /*chunk_address*/) {
  ++test::senders_made();
  return std::make_shared<transport::StagedSender>(std::move(plan), services.memory, nullptr, attempt, nullptr, 1,
                                                   *services.copy_threads, services.waker);
}
void Reach::try_first_lane(Services& /*services*/, const std::string& /*peer*/) noexcept {}
void Reach::close() noexcept {}

}  // namespace kvlink::handoff

namespace kvlink::transport {

// A sender that sends nothing, and has nothing left to send.
struct StagedSender::State {};
StagedSender::StagedSender(std::shared_ptr<const plan::Plan> /*plan*/, std::shared_ptr<const LocalMemory> /*source*/,
                           std::shared_ptr<ucx::Endpoint> /*endpoint*/, const AttemptId& /*attempt*/,
                           std::shared_ptr<ChunkPool> /*chunks*/, std::uint32_t /*window_chunks*/,
                           CopyThreads& /*copy_threads*/, const Waker& /*waker*/) {}
StagedSender::~StagedSender() = default;
void StagedSender::start() noexcept {}
bool StagedSender::advance() noexcept {
  return false;
}
void StagedSender::credit(std::uint32_t /*chunks*/) noexcept {}
void StagedSender::cancel() noexcept {}
bool StagedSender::drained() const noexcept {
  return true;
}
std::optional<Failure> StagedSender::failure() const {
  return std::nullopt;
}
const AttemptId& StagedSender::attempt() const noexcept {
  static constexpr AttemptId kNone{};
  return kNone;  // asked for only by who has a failure to tell
}

}  // namespace kvlink::transport
