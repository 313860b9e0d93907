// The target's book under sources that have authenticated and then say what they like, while transfers end well, badly
// or late, deadlines pass and connections break: a pull of one or two sources, or a reservation that is pushed into.
//
// Success needs VALID from every source, after all bytes came and it was asked for; sums that differ never succeed; the
// outcome comes once; blocks are held until nothing writes them any more; and nothing is left at the end.
#include <array>
#include <memory>
#include <vector>

#include "fuzz.hpp"
#include "inline_copies.hpp"
#include "peers.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using fuzz::Bytes;
using fuzz::FuzzedPeer;
using test::kBlockBytes;
using test::kBlocks;
using test::kSecond;
using test::kTokens;
using transport::Integrity;

const HandoffId kPulled{.epoch = {9}, .sequence = 7};
const HandoffId kReserved{.epoch = {1}, .sequence = 4};

struct Target : test::Node {
  PullBook book{services, {}};
  std::array<FuzzedPeer, 2> sources{FuzzedPeer{PeerRole::source, fuzz::one_geometry(), {transport::Lane::mapped}},
                                    FuzzedPeer{PeerRole::source, fuzz::one_geometry(), {transport::Lane::mapped}}};
  std::array<bool, 2> said_valid{};  // to a CONFIRM of this very attempt
  std::shared_ptr<Handoff> handle;
  std::vector<PartRequest> parts;
  bool is_reservation{false};
  bool lied{false};  // about a sum, while it counted
  std::int64_t now = start;

  Target() {
    test::transfers().clear();
    services.own_template = fuzz::one_geometry();
  }

  void begin(fuzz::Input& input) {
    const std::uint8_t shape = input.byte();
    is_reservation = shape % 3 == 2;
    if (is_reservation) {
      parts.push_back({.attempt = {.handoff = kReserved, .attempt = 1}, .peer = std::make_shared<Peer>()});
    } else {
      for (std::uint32_t part = 0; part <= shape % 3; ++part) {
        parts.push_back({.attempt = {.handoff = kPulled, .attempt = part + 1}, .peer = sources[part].peer});
      }
    }
    handle = std::make_shared<Handoff>(is_reservation ? Role::reservation : Role::pull, parts.front().attempt, "",
                                       is_reservation ? State::reserved : State::connecting, services.bells);
    services.holds->acquire_exclusive(kBlocks);
    ++services.counters.live;
    book.submit({.handle = handle,
                 .parts = parts,
                 .blocks = kBlocks,
                 .written = kBlocks,
                 .num_tokens = kTokens,
                 .skip_tokens = (shape & 128U) != 0 ? 1U : 0U,
                 .submitted_ns = start,
                 .deadline_ns = start + 10 * kSecond,
                 .lane = std::nullopt,
                 .integrity = fuzz::integrity_of(input),
                 .is_reservation = is_reservation});
  }
  /// Which of the pull's attempts is this source's: a reservation's is what it pushes.
  [[nodiscard]] AttemptId attempt_at(std::uint32_t source) const {
    if (!is_reservation) return {.handoff = kPulled, .attempt = source + 1};
    return {.handoff = {.epoch = {2}, .sequence = 8 + source}, .attempt = 1};
  }
  /// Whether the source was asked to confirm, and has not answered.
  [[nodiscard]] bool is_confirming(std::uint32_t source) const {
    return std::ranges::any_of(sources[source].sent, [&](const test::Message& message) {
      return message.kind == Kind::confirm && message.attempt == attempt_at(source);
    });
  }
  /// As Engine::dispatch does.
  void deliver(std::uint32_t source, Kind kind, const AttemptId& attempt, Bytes body) {
    const PeerPtr& from = sources[source].peer;
    if (from->lost) return;
    switch (kind) {
      case Kind::grant:
        if (auto grant = parse_grant(body)) book.on_grant(from, attempt, std::move(*grant));
        break;
      case Kind::refuse:
        if (const auto refuse = parse_refuse(body)) book.on_refuse(from, attempt, *refuse);
        break;
      case Kind::sums:
        if (const auto sums = parse_sums(body)) book.on_sums(from, attempt, *sums);
        break;
      case Kind::valid:
        said_valid[source] = said_valid[source] || (attempt == attempt_at(source) && is_confirming(source));
        book.on_valid(from, attempt);
        break;
      case Kind::push:
        if (const auto push = parse_push(body)) book.on_push(from, attempt.handoff, *push);
        break;
      case Kind::ready:
        if (const auto ready = parse_ready(body)) book.on_piece(from, attempt, *ready);
        break;
      case Kind::commit:
        if (auto payload = parse_commit(body)) book.on_commit(from, attempt, *std::move(payload));
        break;
      case Kind::claim:
      case Kind::check:
      case Kind::fetch:
      case Kind::credit:
      case Kind::confirm:
      case Kind::cancel:
      case Kind::renew:
      case Kind::decline:
        break;  // It is not its part to send them: the engine ends the connection.
    }
  }
  void check() {
    for (auto& source : sources) source.take();
    HOLDS(ended() == (handle->has_outcome() ? 1U : 0U));
    HOLDS(!handle->released() || handle->has_outcome());
    const Holds::Count held = services.holds->count();
    HOLDS(held.shared == 0 && held.exclusive + held.quarantined == (handle->released() ? 0U : 2U));
    // Blocks that are still written into after the outcome are bounded by the quarantine, not by the count of handoffs.
    HOLDS(services.counters.live == (handle->has_outcome() ? 0U : 1U));
    bool drained = true;
    bool arrived = true;
    for (const auto& transfer : test::transfers()) {
      drained = drained && transfer->drained();
      arrived = arrived && transfer->done;
    }
    HOLDS(!handle->released() || drained);
    for (const auto& source : sources) HOLDS(source.count(Kind::confirm) == 0 || arrived);
    if (handle->state() == State::succeeded) check_success();
  }
  void check_success() const {
    HOLDS(!lied);
    HOLDS(handle->result()->valid_prefix_tokens == kTokens && !handle->result()->failure);
    if (is_reservation) HOLDS(said_valid[0] || said_valid[1]);
    for (std::size_t part = 0; part < parts.size() && !is_reservation; ++part) HOLDS(said_valid[part]);
  }
  void end_transfers() {
    for (const auto& transfer : test::transfers()) transfer->done = true;
  }
};

Grant grant_of(fuzz::Input& input) {
  Grant grant{.remaining_ms = 60'000,
              .num_tokens = kTokens,
              .integrity = fuzz::integrity_of(input),
              .payload = {},
              .blocks = {{0, 1}}};
  const std::uint8_t spoiled = input.byte();
  if (spoiled >= 208) grant.blocks.front()[spoiled % 2] = static_cast<std::int32_t>(input.edgy32(8));
  if (spoiled >= 224) grant.num_tokens = input.edgy(3);
  if (spoiled >= 232) grant.blocks.resize(spoiled % 4);
  if (spoiled >= 240) grant.remaining_ms = input.edgy32(60) * 1000;
  if (spoiled >= 248) grant.payload.resize(spoiled % 8);
  return grant;
}

/// The sums of what this side holds, or others.
std::vector<std::byte> sums_of(fuzz::Input& input, bool& lies) {
  const std::vector<std::byte> block(kBlockBytes, std::byte{7});
  const std::span<const std::byte> piece(block);
  std::vector<std::byte> sums;
  const bool is_short = input.flag();
  const auto kind = is_short ? Integrity::crc32c : Integrity::xxh3;
  const std::uint64_t sum = transport::sum_of({&piece, 1}, kind);
  for (std::uint32_t cell = 0; cell <= input.below(2); ++cell) {
    const auto raw = std::as_bytes(std::span(&sum, 1)).first(transport::sum_bytes(kind));
    sums.insert(sums.end(), raw.begin(), raw.end());
  }
  lies = input.byte() >= 192;
  if (lies) sums[input.below(static_cast<std::uint32_t>(sums.size()))] ^= std::byte{1};
  return sums;
}

/// A source says one thing that is well formed.
void say(Target& target, fuzz::Input& input, Kind kind) {
  const std::uint32_t source = input.below(2);
  AttemptId attempt = target.attempt_at(source);
  if (input.byte() >= 240) attempt.attempt = input.edgy32(3);
  std::vector<std::byte> frame;
  bool lies = false;
  if (kind == Kind::grant) {
    write_grant(frame, attempt, grant_of(input));
  } else if (kind == Kind::refuse) {
    write_refuse(frame, attempt, {static_cast<Code>(1 + input.below(23)), "scripted"});
  } else if (kind == Kind::sums) {
    const auto sums = sums_of(input, lies);
    write_sums(frame, attempt, {.first_byte = input.edgy(3) * 4, .bytes = sums});
  } else if (kind == Kind::push) {
    write_push(frame, input.byte() < 240 ? kReserved : kPulled,
               {.offer = attempt.handoff, .num_tokens = input.byte() < 240 ? kTokens : input.edgy(3)});
  } else if (kind == Kind::ready) {
    Ready ready{
        .layers = {{.first = 0, .end = 1}}, .first_token = input.edgy(1), .end_token = input.edgy(2), .blocks = {}};
    if (input.flag()) ready.blocks = {{0, 1}};
    if (input.byte() >= 240) ready.layers.front().end = input.edgy32(2);
    write_ready(frame, attempt, ready);
  } else if (kind == Kind::commit) {
    write_commit(frame, attempt, std::vector<std::byte>(input.below(4)));
  } else {
    write_empty(frame, kind, attempt);
  }
  const auto header = parse_header(std::span(frame).first<kHeaderBytes>());
  const bool counts = lies && attempt == target.attempt_at(source) && !target.handle->has_outcome();
  const auto stale = target.stale();
  target.deliver(source, kind, header->attempt, Bytes(frame).subspan(kHeaderBytes));
  target.lied = target.lied || (counts && target.stale() == stale && !target.sources[source].peer->lost);
}

void step(Target& target, fuzz::Input& input) {
  constexpr std::array kKinds{Kind::grant, Kind::grant, Kind::sums,  Kind::sums,  Kind::valid,  Kind::valid,
                              Kind::push,  Kind::push,  Kind::ready, Kind::ready, Kind::commit, Kind::refuse};
  const std::uint8_t what = input.byte();
  if (what < 160) {
    say(target, input, kKinds[what % kKinds.size()]);
  } else if (what < 168) {
    const std::uint32_t source = what % 2;
    const auto kind = static_cast<Kind>(1 + input.below(15));
    if (kind == Kind::sums) return;  // whose sums are right is not known here
    target.deliver(source, kind, target.attempt_at(source), fuzz::raw_body(input));
  } else if (what < 208) {
    auto& all = test::transfers();
    if (all.empty()) return;
    auto& transfer = *all[what % all.size()];
    if (transfer.drained()) return;  // A transfer ends once, also by being cancelled.
    transfer.done = what < 196;
    transfer.broken = what >= 196 && what < 202;
    transfer.slow = what >= 202;
  } else if (what < 236) {
    if (what >= 224) target.now += std::int64_t{input.byte()} * kSecond / 32;
  } else if (what < 242) {
    FuzzedPeer& lost = target.sources[what % 2];
    lost.lose();
    target.book.on_peer_lost(lost.peer);
  } else if (what < 246) {
    target.book.cancel(target.handle->id(), {Code::cancelled, "scripted"});
  }
  (void)target.book.turn(target.now);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Target target;
  target.begin(input);
  for (int steps = 0; steps < 32 && !input.empty(); ++steps) {
    step(target, input);
    target.check();
  }
  target.book.close_all({Code::closed, "scripted"});
  target.check();
  HOLDS(target.handle->has_outcome());
  target.end_transfers();
  (void)target.book.turn(target.now);
  target.check();
  HOLDS(target.handle->released() && target.book.drained());
  return 0;
}
