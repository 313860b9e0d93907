// The control messages of a handoff, and their bytes. docs/WIRE.md describes the same frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/transport/integrity.hpp"
#include "kvlink/transport/lane.hpp"

namespace kvlink::handoff {

/// Numbers travel: never renumber, only append.
enum class Kind : std::uint8_t {
  claim = 1,     // target to source: may I read this?
  grant = 2,     // source to target: yes, these blocks, for so long
  refuse = 3,    // source to target: no, or no longer
  fetch = 4,     // target to source, staged lane: send me these pieces
  credit = 5,    // target to source, staged lane: so many chunks are scattered
  confirm = 6,   // target to source: I have read everything
  valid = 7,     // source to target: the grant never lapsed, so what you read is right
  cancel = 8,    // target to source: I gave up
  renew = 9,     // target to source: I still read these; one frame a tick for all of them
  check = 10,    // target to source, integrity: sum these pieces, which I am reading
  sums = 11,     // source to target: some of the sums of its blocks, made while the grant lived
  push = 12,     // source to target: I push to this reservation of yours; claim my offer
  ready = 13,    // source to target: these layers are ready, for these tokens
  commit = 14,   // source to target: all is ready, and here is the payload
  decline = 15,  // target to source: no to a push
};

/// The newest dialect of frames that this build speaks, and all older ones. The handshake chooses one.
inline constexpr std::uint8_t kNewestDialect = 1;
/// Where a header has its dialect: the channel, which knows it, fills it in.
inline constexpr std::size_t kDialectOffset = 5;
inline constexpr std::size_t kHeaderBytes = 40;
/// A grant for a million blocks with the largest payload fits; anything longer is an attack or a bug.
inline constexpr std::uint32_t kMaxBodyBytes = 16U << 20U;
inline constexpr std::size_t kMaxPayloadBytes = 4U << 20U;
inline constexpr std::size_t kMaxGroups = 64;
inline constexpr std::uint32_t kMaxLayerRanges = 1U << 16U;
inline constexpr std::size_t kMaxAddressBytes = 64U << 10U;
inline constexpr std::size_t kMaxMessageText = 1024;

/// As many as a ticket may have readers.
inline constexpr std::uint32_t kMaxRanks = 1U << 16U;
inline constexpr std::size_t kRenewalBytes = 32;
/// As many as one frame takes: half of what a node can have live at most.
inline constexpr std::uint32_t kMaxRenewals = (kMaxBodyBytes - 4) / kRenewalBytes;

struct Header {
  std::uint32_t body_bytes{};
  Kind kind{};
  std::uint8_t dialect{};
  AttemptId attempt{};
};

struct Claim {
  transport::Lane lane{};
  std::uint64_t first_token{};
  std::uint64_t end_token{};
  std::uint32_t remaining_ms{};      // of the claimer's deadline, counted from sending
  transport::Integrity integrity{};  // that it demands; none: what the source offers
  std::uint32_t ranks{1};            // nodes that claim this together: one reader
};

struct Grant {
  std::uint32_t remaining_ms{};  // of the lease, counted from sending
  std::uint64_t num_tokens{};
  transport::Integrity integrity{};  // of this attempt: what was demanded, else what is offered
  std::vector<std::byte> payload;
  std::vector<std::vector<std::int32_t>> blocks;  // one table a group, from token 0
};

/// Names the offer that the target is to claim; the header names the reservation.
struct Push {
  HandoffId offer;
  std::uint64_t num_tokens{};
};

/// Half-open range of a template's layers.
struct LayerRange {
  std::uint32_t first{};
  std::uint32_t end{};
  bool operator==(const LayerRange&) const = default;
};

/// Layers that are ready for some tokens, and entries that follow those of the source's block tables that came before.
struct Ready {
  std::vector<LayerRange> layers;  // ascending; none: only blocks
  std::uint64_t first_token{};
  std::uint64_t end_token{};
  std::vector<std::vector<std::int32_t>> blocks;  // one list a group, as in Grant
};

struct Refuse {
  Code code{};
  std::string message;
};

/// Tokens of one source block that the target wants: 8 bytes on the wire.
struct FetchPiece {
  std::int32_t block{};
  std::uint16_t token{};
  std::uint16_t tokens{};
};

struct Fetch {
  std::vector<std::vector<FetchPiece>> pieces;  // one list a group
  std::vector<std::byte>
      chunk_address{};               // of the UCX worker that takes the chunks; none: the handshake's, or no chunks
  std::vector<LayerRange> layers{};  // of a push: only these; none: all
};

/// A stretch of the sums that CHECK asked for.
struct Sums {
  std::uint64_t first_byte{};        // counted over all of them
  std::span<const std::byte> bytes;  // of the frame
};

struct Renewal {
  AttemptId attempt;
  std::uint32_t lease_ms{};  // that it asks for, counted from receipt
};

/// Parses a header, in any dialect. Nothing if the kind is unknown or the body is longer than allowed.
[[nodiscard]] std::optional<Header> parse_header(std::span<const std::byte, kHeaderBytes> bytes) noexcept;

/// Appends one whole frame to `out`, its dialect left open.
void write_claim(std::vector<std::byte>& out, const AttemptId& attempt, const Claim& claim);
void write_grant(std::vector<std::byte>& out, const AttemptId& attempt, const Grant& grant);
void write_refuse(std::vector<std::byte>& out, const AttemptId& attempt, const Failure& failure);
/// `kind`: FETCH or CHECK, which names pieces in the same way.
void write_pieces(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt, const Fetch& fetch);
void write_sums(std::vector<std::byte>& out, const AttemptId& attempt, const Sums& sums);
void write_push(std::vector<std::byte>& out, const HandoffId& reservation, const Push& push);
void write_ready(std::vector<std::byte>& out, const AttemptId& attempt, const Ready& ready);
void write_commit(std::vector<std::byte>& out, const AttemptId& attempt, std::span<const std::byte> payload);
/// The header names the offer that PUSH named.
void write_decline(std::vector<std::byte>& out, const HandoffId& offer, const Failure& failure);
/// The header names no attempt: the body does. More than `kMaxRenewals` take more than one frame.
void write_renew(std::vector<std::byte>& out, std::span<const Renewal> renewals);
void write_number(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt, std::uint64_t number);
void write_empty(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt);

/// Bodies; that of DECLINE is like that of REFUSE. Nothing if a length does not fit, a number is out of its range or
/// bytes are left over.
[[nodiscard]] std::optional<Claim> parse_claim(std::span<const std::byte> body);
[[nodiscard]] std::optional<Grant> parse_grant(std::span<const std::byte> body);
[[nodiscard]] std::optional<Refuse> parse_refuse(std::span<const std::byte> body);
[[nodiscard]] std::optional<Fetch> parse_pieces(std::span<const std::byte> body);
[[nodiscard]] std::optional<Push> parse_push(std::span<const std::byte> body);
[[nodiscard]] std::optional<Ready> parse_ready(std::span<const std::byte> body);
[[nodiscard]] std::optional<std::vector<std::byte>> parse_commit(std::span<const std::byte> body);
[[nodiscard]] std::optional<Sums> parse_sums(std::span<const std::byte> body);
[[nodiscard]] std::optional<std::vector<Renewal>> parse_renew(std::span<const std::byte> body);
[[nodiscard]] std::optional<std::uint64_t> parse_number(std::span<const std::byte> body);

}  // namespace kvlink::handoff
