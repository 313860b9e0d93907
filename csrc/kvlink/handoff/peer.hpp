// One connection to another node, as the progress thread sees it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/handoff/channel.hpp"
#include "kvlink/handoff/rate_meter.hpp"
#include "kvlink/handoff/reach.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/plan/conversion.hpp"
#include "kvlink/plan/template.hpp"

namespace kvlink::handoff {

/// Which end of the connection the peer is: the one that dials pulls, so a peer that we dialled is a source.
enum class PeerRole : std::uint8_t { source, claimant };

enum class PeerState : std::uint8_t { connecting, ready, lost };

struct Peer {
  std::uint64_t id{};
  PeerRole role{};
  PeerState state{PeerState::connecting};
  std::string name;
  std::string address;
  Epoch epoch{};
  std::uint8_t dialect{};                                 // of control frames, as the handshake chose
  std::shared_ptr<const plan::Template> layout_template;  // source's layout to target's, whichever of them we are
  std::shared_ptr<const plan::Conversion> conversion;     // of a source: what is converted here; null: nothing
  std::unique_ptr<Channel> channel;
  Reach reach;
  bool watches_writable{false};  // the loop wakes when the socket takes more
  std::optional<Failure> lost;   // why; set by whoever notices, acted on by the loop
  std::uint64_t handoffs{};
  std::uint64_t bytes{};
  RateMeter rate{};  // a source: of transfers that move; a claimant: of grants, until they are confirmed or over

  /// For messages: `decode-2 (10.0.0.4:7000)`.
  [[nodiscard]] std::string title() const { return name.empty() ? address : name + " (" + address + ")"; }
};

using PeerPtr = std::shared_ptr<Peer>;

}  // namespace kvlink::handoff
