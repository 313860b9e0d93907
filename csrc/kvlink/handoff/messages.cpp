#include "kvlink/handoff/messages.hpp"

#include <algorithm>

#include "kvlink/handoff/frame_buffer.hpp"

namespace kvlink::handoff {
namespace {

void write_handoff(FrameWriter& out, const HandoffId& handoff) {
  out.bytes(std::as_bytes(std::span(handoff.epoch)));
  out.number(handoff.sequence);
}

void write_attempt(FrameWriter& out, const AttemptId& attempt) {
  write_handoff(out, attempt.handoff);
  out.number(attempt.attempt);
}

[[nodiscard]] HandoffId read_handoff(FrameReader& from) noexcept {
  HandoffId handoff;
  const auto epoch = from.bytes(sizeof(Epoch));
  if (!epoch.empty()) std::memcpy(handoff.epoch.data(), epoch.data(), sizeof(Epoch));
  handoff.sequence = from.number<std::uint64_t>();
  return handoff;
}

[[nodiscard]] AttemptId read_attempt(FrameReader& from) noexcept {
  AttemptId attempt;
  attempt.handoff = read_handoff(from);
  attempt.attempt = from.number<std::uint32_t>();
  return attempt;
}

/// Writes a header with its length still open, and fills the length in when the body is complete.
class Frame {
 public:
  Frame(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt) : out_(out), start_(out.size()), body(out) {
    body.number(std::uint32_t{0});
    body.number(static_cast<std::uint8_t>(kind));
    body.number(std::uint8_t{0});  // the dialect, see Channel::flush
    body.number(std::uint16_t{0});
    write_attempt(body, attempt);
    body.number(std::uint32_t{0});
  }
  ~Frame() {
    const auto body_bytes = static_cast<std::uint32_t>(out_.size() - start_ - kHeaderBytes);
    std::memcpy(out_.data() + start_, &body_bytes, sizeof body_bytes);
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

 private:
  std::vector<std::byte>& out_;
  std::size_t start_;

 public:
  FrameWriter body;
};

void write_layers(FrameWriter& out, const std::vector<LayerRange>& layers) {
  out.number(static_cast<std::uint32_t>(layers.size()));
  out.bytes(std::as_bytes(std::span(layers)));
}

/// False if the ranges are too many, empty, or not in ascending order.
[[nodiscard]] bool read_layers(FrameReader& from, std::vector<LayerRange>& layers) {
  static_assert(sizeof(LayerRange) == 8, "a range of layers is eight bytes on the wire");
  const auto count = from.number<std::uint32_t>();
  if (!from.ok() || count > kMaxLayerRanges) return false;
  const auto data = from.bytes(std::size_t{count} * sizeof(LayerRange));
  if (!from.ok()) return false;
  layers.resize(count);
  if (count != 0) std::memcpy(layers.data(), data.data(), data.size());
  std::uint32_t before = 0;
  for (const LayerRange& range : layers) {
    if (range.first < before || range.end <= range.first) return false;
    before = range.end;
  }
  return true;
}

void write_tables(FrameWriter& out, const std::vector<std::vector<std::int32_t>>& tables) {
  out.number(static_cast<std::uint32_t>(tables.size()));
  for (const auto& table : tables) out.number(static_cast<std::uint32_t>(table.size()));
  for (const auto& table : tables) out.bytes(std::as_bytes(std::span(table)));
}

[[nodiscard]] bool read_tables(FrameReader& from, std::vector<std::vector<std::int32_t>>& tables) {
  const auto groups = from.number<std::uint32_t>();
  if (!from.ok() || groups > kMaxGroups) return false;
  std::vector<std::uint32_t> counts(groups);
  for (auto& count : counts) count = from.number<std::uint32_t>();
  for (const std::uint32_t count : counts) {
    const auto data = from.bytes(std::size_t{count} * sizeof(std::int32_t));
    if (!from.ok()) return false;
    auto& table = tables.emplace_back(count);
    if (count != 0) std::memcpy(table.data(), data.data(), data.size());
  }
  return true;
}

[[nodiscard]] bool is_kind(std::uint8_t number) noexcept {
  return number >= static_cast<std::uint8_t>(Kind::claim) && number <= static_cast<std::uint8_t>(Kind::decline);
}

void write_failure(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt, const Failure& failure) {
  const auto text = std::string_view(failure.message).substr(0, kMaxMessageText);
  Frame frame(out, kind, attempt);
  frame.body.number(static_cast<std::uint8_t>(failure.code));
  frame.body.number(static_cast<std::uint16_t>(text.size()));
  frame.body.text(text);
}

[[nodiscard]] bool is_code(std::uint8_t number) noexcept {
  return number >= static_cast<std::uint8_t>(Code::invalid_argument) &&
         number <= static_cast<std::uint8_t>(Code::data_corrupted);
}

}  // namespace

std::optional<Header> parse_header(std::span<const std::byte, kHeaderBytes> bytes) noexcept {
  FrameReader reader(bytes);
  Header header;
  header.body_bytes = reader.number<std::uint32_t>();
  const auto kind = reader.number<std::uint8_t>();
  header.dialect = reader.number<std::uint8_t>();
  (void)reader.number<std::uint16_t>();
  header.attempt = read_attempt(reader);
  if (!is_kind(kind) || header.body_bytes > kMaxBodyBytes) return std::nullopt;
  header.kind = static_cast<Kind>(kind);
  return header;
}

void write_claim(std::vector<std::byte>& out, const AttemptId& attempt, const Claim& claim) {
  Frame frame(out, Kind::claim, attempt);
  frame.body.number(static_cast<std::uint8_t>(claim.lane));
  frame.body.number(claim.first_token);
  frame.body.number(claim.end_token);
  frame.body.number(claim.remaining_ms);
  frame.body.number(static_cast<std::uint8_t>(claim.integrity));
  if (claim.ranks > 1) frame.body.number(claim.ranks);
}

std::optional<Claim> parse_claim(std::span<const std::byte> body) {
  FrameReader reader(body);
  const auto lane = transport::lane_from_number(reader.number<std::uint8_t>());
  Claim claim;
  claim.first_token = reader.number<std::uint64_t>();
  claim.end_token = reader.number<std::uint64_t>();
  claim.remaining_ms = reader.number<std::uint32_t>();
  const auto integrity = transport::integrity_from_number(reader.number<std::uint8_t>());
  if (reader.remaining() != 0) {
    claim.ranks = reader.number<std::uint32_t>();
    if (claim.ranks < 2 || claim.ranks > kMaxRanks) return std::nullopt;
  }
  if (!reader.complete() || !lane || !integrity || claim.first_token > claim.end_token) return std::nullopt;
  claim.lane = *lane;
  claim.integrity = *integrity;
  return claim;
}

void write_grant(std::vector<std::byte>& out, const AttemptId& attempt, const Grant& grant) {
  Frame frame(out, Kind::grant, attempt);
  frame.body.number(grant.remaining_ms);
  frame.body.number(grant.num_tokens);
  frame.body.number(static_cast<std::uint8_t>(grant.integrity));
  frame.body.number(static_cast<std::uint32_t>(grant.payload.size()));
  frame.body.number(static_cast<std::uint32_t>(grant.blocks.size()));
  for (const auto& table : grant.blocks) frame.body.number(static_cast<std::uint32_t>(table.size()));
  frame.body.bytes(grant.payload);
  for (const auto& table : grant.blocks) frame.body.bytes(std::as_bytes(std::span(table)));
}

std::optional<Grant> parse_grant(std::span<const std::byte> body) {
  FrameReader reader(body);
  Grant grant;
  grant.remaining_ms = reader.number<std::uint32_t>();
  grant.num_tokens = reader.number<std::uint64_t>();
  const auto integrity = transport::integrity_from_number(reader.number<std::uint8_t>());
  const auto payload_bytes = reader.number<std::uint32_t>();
  const auto groups = reader.number<std::uint32_t>();
  if (!reader.ok() || !integrity || payload_bytes > kMaxPayloadBytes || groups > kMaxGroups) return std::nullopt;
  grant.integrity = *integrity;
  std::vector<std::uint32_t> counts(groups);
  for (auto& count : counts) count = reader.number<std::uint32_t>();
  const auto payload = reader.bytes(payload_bytes);
  grant.payload.assign(payload.begin(), payload.end());
  for (const std::uint32_t count : counts) {
    const auto data = reader.bytes(std::size_t{count} * sizeof(std::int32_t));
    if (!reader.ok()) return std::nullopt;
    auto& table = grant.blocks.emplace_back(count);
    if (count != 0) std::memcpy(table.data(), data.data(), data.size());
  }
  return reader.complete() ? std::optional(std::move(grant)) : std::nullopt;
}

void write_refuse(std::vector<std::byte>& out, const AttemptId& attempt, const Failure& failure) {
  write_failure(out, Kind::refuse, attempt, failure);
}

std::optional<Refuse> parse_refuse(std::span<const std::byte> body) {
  FrameReader reader(body);
  const auto code = reader.number<std::uint8_t>();
  const auto length = reader.number<std::uint16_t>();
  Refuse refuse;
  refuse.message = reader.text(length);
  if (!reader.complete() || !is_code(code) || length > kMaxMessageText) return std::nullopt;
  refuse.code = static_cast<Code>(code);
  return refuse;
}

void write_pieces(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt, const Fetch& fetch) {
  Frame frame(out, kind, attempt);
  frame.body.number(static_cast<std::uint32_t>(fetch.pieces.size()));
  for (const auto& pieces : fetch.pieces) frame.body.number(static_cast<std::uint32_t>(pieces.size()));
  for (const auto& pieces : fetch.pieces) frame.body.bytes(std::as_bytes(std::span(pieces)));
  frame.body.number(static_cast<std::uint32_t>(fetch.chunk_address.size()));
  frame.body.bytes(fetch.chunk_address);
  if (!fetch.layers.empty()) write_layers(frame.body, fetch.layers);
}

std::optional<Fetch> parse_pieces(std::span<const std::byte> body) {
  static_assert(sizeof(FetchPiece) == 8, "a piece is eight bytes on the wire");
  FrameReader reader(body);
  const auto groups = reader.number<std::uint32_t>();
  if (!reader.ok() || groups > kMaxGroups) return std::nullopt;
  std::vector<std::uint32_t> counts(groups);
  for (auto& count : counts) count = reader.number<std::uint32_t>();
  Fetch fetch;
  for (const std::uint32_t count : counts) {
    const auto data = reader.bytes(std::size_t{count} * sizeof(FetchPiece));
    if (!reader.ok()) return std::nullopt;
    auto& pieces = fetch.pieces.emplace_back(count);
    if (count != 0) std::memcpy(pieces.data(), data.data(), data.size());
  }
  const auto address_bytes = reader.number<std::uint32_t>();
  if (!reader.ok() || address_bytes > kMaxAddressBytes) return std::nullopt;
  const auto address = reader.bytes(address_bytes);
  fetch.chunk_address.assign(address.begin(), address.end());
  if (reader.remaining() != 0 && !read_layers(reader, fetch.layers)) return std::nullopt;
  return reader.complete() ? std::optional(std::move(fetch)) : std::nullopt;
}

void write_push(std::vector<std::byte>& out, const HandoffId& reservation, const Push& push) {
  Frame frame(out, Kind::push, {.handoff = reservation, .attempt = 0});
  write_handoff(frame.body, push.offer);
  frame.body.number(push.num_tokens);
}

std::optional<Push> parse_push(std::span<const std::byte> body) {
  FrameReader reader(body);
  Push push;
  push.offer = read_handoff(reader);
  push.num_tokens = reader.number<std::uint64_t>();
  return reader.complete() ? std::optional(push) : std::nullopt;
}

void write_ready(std::vector<std::byte>& out, const AttemptId& attempt, const Ready& ready) {
  Frame frame(out, Kind::ready, attempt);
  frame.body.number(ready.first_token);
  frame.body.number(ready.end_token);
  write_layers(frame.body, ready.layers);
  write_tables(frame.body, ready.blocks);
}

std::optional<Ready> parse_ready(std::span<const std::byte> body) {
  FrameReader reader(body);
  Ready ready;
  ready.first_token = reader.number<std::uint64_t>();
  ready.end_token = reader.number<std::uint64_t>();
  if (!read_layers(reader, ready.layers) || !read_tables(reader, ready.blocks)) return std::nullopt;
  if (!reader.complete() || ready.first_token > ready.end_token) return std::nullopt;
  return ready;
}

void write_commit(std::vector<std::byte>& out, const AttemptId& attempt, std::span<const std::byte> payload) {
  Frame frame(out, Kind::commit, attempt);
  frame.body.bytes(payload);
}

std::optional<std::vector<std::byte>> parse_commit(std::span<const std::byte> body) {
  if (body.size() > kMaxPayloadBytes) return std::nullopt;
  return std::vector<std::byte>(body.begin(), body.end());
}

void write_decline(std::vector<std::byte>& out, const HandoffId& offer, const Failure& failure) {
  write_failure(out, Kind::decline, {.handoff = offer, .attempt = 0}, failure);
}

void write_sums(std::vector<std::byte>& out, const AttemptId& attempt, const Sums& sums) {
  Frame frame(out, Kind::sums, attempt);
  frame.body.number(sums.first_byte);
  frame.body.bytes(sums.bytes);
}

std::optional<Sums> parse_sums(std::span<const std::byte> body) {
  FrameReader reader(body);
  Sums sums{.first_byte = reader.number<std::uint64_t>(), .bytes = {}};
  sums.bytes = reader.bytes(reader.remaining());
  return reader.complete() && !sums.bytes.empty() ? std::optional(sums) : std::nullopt;
}

void write_renew(std::vector<std::byte>& out, std::span<const Renewal> renewals) {
  do {
    const auto now = renewals.first(std::min<std::size_t>(renewals.size(), kMaxRenewals));
    renewals = renewals.subspan(now.size());
    Frame frame(out, Kind::renew, {});
    frame.body.number(static_cast<std::uint32_t>(now.size()));
    for (const Renewal& renewal : now) {
      write_attempt(frame.body, renewal.attempt);
      frame.body.number(renewal.lease_ms);
    }
  } while (!renewals.empty());
}

std::optional<std::vector<Renewal>> parse_renew(std::span<const std::byte> body) {
  FrameReader reader(body);
  const auto count = reader.number<std::uint32_t>();
  if (!reader.ok() || count > kMaxRenewals || reader.remaining() != count * kRenewalBytes) return std::nullopt;
  std::vector<Renewal> renewals(count);
  for (Renewal& renewal : renewals) {
    renewal.attempt = read_attempt(reader);
    renewal.lease_ms = reader.number<std::uint32_t>();
  }
  return renewals;
}

void write_number(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt, std::uint64_t number) {
  Frame frame(out, kind, attempt);
  frame.body.number(number);
}

std::optional<std::uint64_t> parse_number(std::span<const std::byte> body) {
  FrameReader reader(body);
  const auto number = reader.number<std::uint64_t>();
  return reader.complete() ? std::optional(number) : std::nullopt;
}

void write_empty(std::vector<std::byte>& out, Kind kind, const AttemptId& attempt) {
  const Frame frame(out, kind, attempt);
}

}  // namespace kvlink::handoff
