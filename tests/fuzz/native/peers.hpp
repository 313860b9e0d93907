// Peers of a scripted side, at the other end of no socket: what the books send them is taken out of the outbox.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "fuzz.hpp"
#include "scripted_sides.hpp"

namespace kvlink::fuzz {

struct FuzzedPeer {
  handoff::PeerPtr peer = std::make_shared<handoff::Peer>();
  std::vector<test::Message> sent;  // all that the books have sent, oldest first

  FuzzedPeer(handoff::PeerRole role, const std::shared_ptr<const plan::Template>& geometry,
             const std::vector<transport::Lane>& lanes) {
    peer->role = role;
    peer->state = handoff::PeerState::ready;
    peer->name = "other";
    peer->layout_template = geometry;
    connect();
    peer->reach = handoff::Reach::open({}, lanes, false);
  }

  /// Takes what was sent meanwhile, which must be whole frames.
  void take() {
    if (!peer->channel) return;
    for (Bytes rest(peer->channel->outbox()); !rest.empty();) {
      HOLDS(rest.size() >= handoff::kHeaderBytes);
      const auto header = handoff::parse_header(rest.first<handoff::kHeaderBytes>());
      HOLDS(header && rest.size() - handoff::kHeaderBytes >= header->body_bytes);
      const Bytes body = rest.subspan(handoff::kHeaderBytes, header->body_bytes);
      sent.push_back({.kind = header->kind, .attempt = header->attempt, .body = {body.begin(), body.end()}});
      rest = rest.subspan(handoff::kHeaderBytes + body.size());
    }
    // Another one, since a channel that has written to its socket knows how far in its outbox it is.
    if (!peer->channel->outbox().empty()) connect();
  }
  void connect() { peer->channel = std::make_unique<handoff::Channel>(-1, handoff::kNewestDialect); }
  [[nodiscard]] std::size_t count(handoff::Kind kind) const {
    return static_cast<std::size_t>(std::ranges::count(sent, kind, &test::Message::kind));
  }
  void lose() {
    peer->state = handoff::PeerState::lost;
    peer->lost = Failure{Code::peer_lost, "scripted"};
  }
};

/// The same template for every input: it is immutable.
inline const std::shared_ptr<const plan::Template>& one_geometry() {
  static const std::shared_ptr<const plan::Template> made = test::geometry();
  return made;
}

/// What follows in the input as a body: mostly a few bytes, which a parser refuses, and rarely many.
inline std::vector<std::byte> raw_body(Input& input) {
  const Bytes raw = input.bytes(input.byte());
  return {raw.begin(), raw.end()};
}

inline transport::Integrity integrity_of(Input& input) {
  const std::uint8_t kind = input.byte();
  return kind < 160   ? transport::Integrity::none
         : kind < 224 ? transport::Integrity::crc32c
                      : transport::Integrity::xxh3;
}

}  // namespace kvlink::fuzz
