// The source's book under readers that have authenticated and then say what they like, in frames or in bytes that are
// none, while leases end, owners cancel and connections break.
//
// Each handoff ends once, VALID goes to no more readers than it has, blocks are held exactly as long as an offer of
// them lives, and nothing is left at the end.
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
using test::kBlocks;
using test::kSecond;
using test::kTokens;

/// What one handle was made for.
struct Offered {
  std::shared_ptr<Handoff> handle;
  std::shared_ptr<PushState> push{};
  std::uint32_t readers{1};
};

struct Source : test::Node {
  OfferBook book{services};
  std::array<FuzzedPeer, 2> readers{FuzzedPeer{PeerRole::claimant, fuzz::one_geometry(), {}},
                                    FuzzedPeer{PeerRole::claimant, fuzz::one_geometry(), {}}};
  std::vector<Offered> offers;
  std::int64_t now = start;
  bool is_closed{false};

  Source() { services.own_template = fuzz::one_geometry(); }

  [[nodiscard]] HandoffId id_of(std::uint32_t number) const {
    // The first few are this node's own, others a mint's.
    return number < 4 ? HandoffId{.epoch = {1}, .sequence = 7 + number} : HandoffId{.epoch = {5}, .sequence = number};
  }
  void offer(fuzz::Input& input) {
    if (offers.size() == 6) return;
    const HandoffId id = id_of(input.below(6));
    const std::uint8_t shape = input.byte();
    const std::uint32_t wanted = 1 + shape % 3;
    auto handle = std::make_shared<Handoff>(Role::offer, AttemptId{.handoff = id, .attempt = 0}, "", State::offered,
                                            services.bells);
    services.holds->acquire_shared(kBlocks);
    ++services.counters.live;
    offers.push_back({.handle = handle, .readers = wanted});
    book.add({.handle = handle,
              .blocks = kBlocks,
              .num_tokens = kTokens,
              .expires_ns = now + 10 * kSecond,
              .ttl_ms = 10'000,
              .cap_ns = now + 30 * kSecond,
              .readers = wanted,
              .integrity = fuzz::integrity_of(input),
              .payload = {std::byte{shape}}});
    (void)book.turn(now);
  }
  void push(fuzz::Input& input) {
    if (offers.size() == 6) return;
    const HandoffId id = id_of(input.below(4));
    auto handle = std::make_shared<Handoff>(Role::push, AttemptId{.handoff = id, .attempt = 0}, "", State::offered,
                                            services.bells);
    auto state = std::make_shared<PushState>(services.holds, services.own_template, kTokens, input.flag());
    state->add(kBlocks);
    ++services.counters.live;
    offers.push_back({.handle = handle, .push = state});
    book.add({.handle = handle,
              .blocks = {},
              .num_tokens = kTokens,
              .expires_ns = now + 10 * kSecond,
              .ttl_ms = 10'000,
              .cap_ns = now + 10 * kSecond,
              .readers = 1,
              .integrity = fuzz::integrity_of(input),
              .payload = {},
              .push = state,
              .reservation = {.epoch = {9}, .sequence = 4}});
    (void)book.turn(now);
    book.start_push(id, readers[input.below(2)].peer);
  }
  /// As Engine::dispatch does.
  void deliver(FuzzedPeer& from, Kind kind, const AttemptId& attempt, Bytes body) {
    if (from.peer->lost) return;
    switch (kind) {
      case Kind::claim:
        if (const auto claim = parse_claim(body)) book.on_claim(from.peer, attempt, *claim);
        break;
      case Kind::check:
        if (const auto pieces = parse_pieces(body)) book.on_check(from.peer, attempt, *pieces);
        break;
      case Kind::fetch:
        if (const auto fetch = parse_pieces(body)) book.on_fetch(from.peer, attempt, *fetch);
        break;
      case Kind::credit:
        if (const auto chunks = parse_number(body)) book.on_credit(from.peer, attempt, *chunks);
        break;
      case Kind::confirm:
        if (const auto bytes = parse_number(body)) book.on_confirm(from.peer, attempt, *bytes);
        break;
      case Kind::cancel:
        book.on_cancel(from.peer, attempt);
        break;
      case Kind::renew:
        if (const auto renewals = parse_renew(body)) book.on_renew(from.peer, *renewals, now);
        break;
      case Kind::decline:
        if (const auto decline = parse_refuse(body)) book.on_decline(from.peer, attempt.handoff, *decline);
        break;
      case Kind::grant:
      case Kind::refuse:
      case Kind::valid:
      case Kind::sums:
      case Kind::push:
      case Kind::ready:
      case Kind::commit:
        break;  // It is not its part to send them: the engine ends the connection.
    }
  }
  /// What the owner of a push says; what it may not say it is told.
  void say(fuzz::Input& input) {
    for (const Offered& each : offers) {
      if (!each.push || !input.flag()) continue;
      try {
        if (input.flag()) {
          each.push->commit({});
        } else {
          each.push->announce(each.push->hold_back({}, input.below(3), input.below(3)));
        }
      } catch (const Error& error) {
        // A push that is over says why, which may be whatever a reader has said.
        HOLDS(each.handle->has_outcome() || error.code() != Code::out_of_memory);
      }
      book.tell_ready(each.handle->id().handoff);
    }
  }
  void check() {
    for (auto& reader : readers) reader.take();
    bool some_live = false;
    std::uint64_t over = 0;
    for (const Offered& each : offers) {
      // An offer's outcome and the release of its blocks come together (I3).
      HOLDS(each.handle->released() == each.handle->has_outcome());
      some_live = some_live || !each.handle->released();
      over += each.handle->released() ? 1 : 0;
    }
    HOLDS(ended() <= over);  // one that was refused for its id is counted nowhere
    HOLDS(services.counters.live == offers.size() - over);
    HOLDS(services.holds->count().shared == (some_live ? 2U : 0U));
    HOLDS(services.holds->count().exclusive == 0);
  }
  void check_outcomes() {
    for (const Offered& each : offers) {
      HOLDS(each.handle->has_outcome());
      std::size_t valid = 0;
      bool is_only = true;  // under its id: else VALID may be the other's
      for (const Offered& other : offers)
        is_only = is_only && (&other == &each || other.handle->id() != each.handle->id());
      for (const auto& reader : readers) {
        for (const auto& message : reader.sent) {
          valid += message.kind == Kind::valid && message.attempt.handoff == each.handle->id().handoff ? 1 : 0;
        }
      }
      HOLDS(valid <= each.readers * offers.size());
      if (is_only) HOLDS(each.handle->result()->failure ? valid < each.readers : valid == each.readers);
    }
  }
};

AttemptId attempt_of(fuzz::Input& input, const Source& source) {
  return {.handoff = source.id_of(input.below(6)), .attempt = input.edgy32(3)};
}

Fetch fetch_of(fuzz::Input& input) {
  Fetch fetch;
  fetch.pieces.resize(input.edgy32(1) % 5);
  for (auto& pieces : fetch.pieces) {
    pieces.resize(input.below(4));
    for (std::size_t at = 0; at < pieces.size(); ++at) {
      pieces[at] = {.block = kBlocks[0][at % 2], .token = 0, .tokens = 1};
      if (input.byte() < 64) pieces[at] = {static_cast<std::int32_t>(input.edgy32(8)), input.byte(), input.byte()};
    }
  }
  if (input.byte() < 48) fetch.layers = {{.first = input.edgy32(1), .end = input.edgy32(2)}};
  return fetch;
}

/// One frame that is well formed, and says anything.
std::vector<std::byte> frame_of(fuzz::Input& input, Source& source, Kind kind) {
  std::vector<std::byte> frame;
  const AttemptId attempt = attempt_of(input, source);
  if (kind == Kind::claim) {
    const auto lane = static_cast<transport::Lane>(1 + input.below(4));
    const std::uint64_t first = input.edgy(2);
    write_claim(frame, attempt,
                {.lane = lane,
                 .first_token = first,
                 .end_token = input.edgy(3),
                 .remaining_ms = input.edgy32(200) * 100,
                 .integrity = fuzz::integrity_of(input)});
  } else if (kind == Kind::check || kind == Kind::fetch) {
    write_pieces(frame, kind, attempt, fetch_of(input));
  } else if (kind == Kind::renew) {
    std::vector<Renewal> renewals(input.below(4));
    for (auto& renewal : renewals)
      renewal = {.attempt = attempt_of(input, source), .lease_ms = input.edgy32(200) * 100};
    write_renew(frame, renewals);
  } else if (kind == Kind::decline) {
    write_decline(frame, attempt.handoff, {static_cast<Code>(1 + input.below(23)), "scripted"});
  } else if (kind == Kind::cancel) {
    write_empty(frame, kind, attempt);
  } else {
    write_number(frame, kind, attempt, input.edgy(128));
  }
  return frame;
}

void step(Source& source, fuzz::Input& input) {
  constexpr std::array kKinds{Kind::claim,   Kind::claim,  Kind::claim, Kind::fetch, Kind::credit, Kind::confirm,
                              Kind::confirm, Kind::cancel, Kind::renew, Kind::check, Kind::decline};
  const std::uint8_t what = input.byte();
  if (what < 160) {
    FuzzedPeer& from = source.readers[input.below(2)];
    const auto frame = frame_of(input, source, kKinds[what % kKinds.size()]);
    const auto header = parse_header(std::span(frame).first<kHeaderBytes>());
    source.deliver(from, header->kind, header->attempt, Bytes(frame).subspan(kHeaderBytes));
  } else if (what < 168) {
    const auto kind = static_cast<Kind>(1 + input.below(15));
    const AttemptId attempt = attempt_of(input, source);
    source.deliver(source.readers[what % 2], kind, attempt, fuzz::raw_body(input));
  } else if (what < 192) {
    source.now += std::int64_t{input.byte()} * kSecond / 16;
    (void)source.book.turn(source.now);
  } else if (what < 200) {
    FuzzedPeer& lost = source.readers[what % 2];
    lost.lose();
    source.book.on_peer_lost(lost.peer);
  } else if (what < 208) {
    source.book.cancel(source.id_of(input.below(6)), {Code::cancelled, "scripted"});
  } else if (what < 232) {
    source.offer(input);
  } else if (what < 244) {
    source.push(input);
  } else {
    source.say(input);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Source source;
  source.offer(input);
  for (int steps = 0; steps < 32 && !input.empty(); ++steps) {
    step(source, input);
    source.check();
  }
  source.book.close_all({Code::closed, "scripted"});
  source.book.refuse_parked({Code::closed, "scripted"});
  (void)source.book.turn(source.now);
  source.check();
  source.check_outcomes();
  HOLDS(source.services.holds->count().shared == 0);
  HOLDS(source.book.drained());
  return 0;
}
