// One control frame of a peer: a header of 40 bytes and a body, which each kind reads in its own way.
//
// What is read must come out the same when it is written and read again, and be no larger than what was sent.
#include <vector>

#include "fuzz.hpp"
#include "kvlink/handoff/messages.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using fuzz::Bytes;
using Frame = std::vector<std::byte>;

const AttemptId kAttempt{.handoff = {.epoch = {1, 2, 3}, .sequence = 77}, .attempt = 5};

template <class Parse, class Write>
void survives(Bytes body, Parse parse, Write write) {
  const auto read = parse(body);
  if (!read) return;
  Frame once;
  write(once, *read);
  // A list of layers that is empty may be written out, or left out.
  HOLDS(once.size() <= kHeaderBytes + body.size() && once.size() + sizeof(std::uint32_t) >= kHeaderBytes + body.size());
  const auto again = parse(Bytes(once).subspan(kHeaderBytes));
  HOLDS(again.has_value());
  Frame twice;
  write(twice, *again);
  HOLDS(once == twice);
}

void read_pieces(Bytes body, Kind kind) {
  survives(body, parse_pieces, [kind](Frame& out, const Fetch& fetch) { write_pieces(out, kind, kAttempt, fetch); });
}
void read_failure(Bytes body) {
  survives(body, parse_refuse,
           [](Frame& out, const Refuse& refuse) { write_refuse(out, kAttempt, {refuse.code, refuse.message}); });
}
void read_number(Bytes body) {
  survives(body, parse_number,
           [](Frame& out, std::uint64_t number) { write_number(out, Kind::credit, kAttempt, number); });
}

void read(Kind kind, Bytes body) {
  switch (kind) {
    case Kind::claim:
      return survives(body, parse_claim, [](Frame& out, const Claim& claim) { write_claim(out, kAttempt, claim); });
    case Kind::grant:
      return survives(body, parse_grant, [](Frame& out, const Grant& grant) { write_grant(out, kAttempt, grant); });
    case Kind::refuse:
    case Kind::decline:
      return read_failure(body);
    case Kind::fetch:
    case Kind::check:
      return read_pieces(body, kind);
    case Kind::credit:
    case Kind::confirm:
      return read_number(body);
    case Kind::renew:
      return survives(body, parse_renew,
                      [](Frame& out, const std::vector<Renewal>& renewals) { write_renew(out, renewals); });
    case Kind::sums:
      return survives(body, parse_sums, [](Frame& out, const Sums& sums) { write_sums(out, kAttempt, sums); });
    case Kind::push:
      return survives(body, parse_push, [](Frame& out, const Push& push) { write_push(out, kAttempt.handoff, push); });
    case Kind::ready:
      return survives(body, parse_ready, [](Frame& out, const Ready& ready) { write_ready(out, kAttempt, ready); });
    case Kind::commit:
      return survives(body, parse_commit,
                      [](Frame& out, const Frame& payload) { write_commit(out, kAttempt, payload); });
    case Kind::valid:
    case Kind::cancel:
      return;  // Nothing is read of their bodies.
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes = std::as_bytes(std::span(data, size));
  if (bytes.size() < kHeaderBytes) return 0;
  const auto header = parse_header(bytes.first<kHeaderBytes>());
  if (!header) return 0;
  HOLDS(header->body_bytes <= kMaxBodyBytes);
  // A body of its own, so that a step past its end is seen.
  const Frame body(bytes.begin() + kHeaderBytes, bytes.end());
  read(header->kind, body);
  return 0;
}
