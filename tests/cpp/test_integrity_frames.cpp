// The control messages of integrity: what was written is read again, and what no peer of ours writes is refused.
#include <array>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/messages.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using transport::Integrity;

const AttemptId kAttempt{.handoff = {.epoch = {7}, .sequence = 12}, .attempt = 3};

/// The body of the only frame in `out`, after its header was checked.
[[nodiscard]] std::span<const std::byte> body_of(const std::vector<std::byte>& out, Kind kind) {
  const std::span<const std::byte> all(out);
  const auto header = parse_header(all.first<kHeaderBytes>());
  CHECK(header && header->kind == kind && header->attempt == kAttempt);
  CHECK(header->body_bytes == all.size() - kHeaderBytes);
  return all.subspan(kHeaderBytes);
}

void claims_and_grants_name_a_checksum_or_none() {
  for (const Integrity integrity : {Integrity::none, Integrity::crc32c, Integrity::xxh3}) {
    std::vector<std::byte> out;
    write_claim(out, kAttempt, {.lane = transport::Lane::staged, .end_token = 5, .integrity = integrity});
    CHECK(parse_claim(body_of(out, Kind::claim))->integrity == integrity);
    out.clear();
    write_grant(out, kAttempt,
                {.remaining_ms = 1, .num_tokens = 5, .integrity = integrity, .payload = {}, .blocks = {{3, 1}}});
    const auto grant = parse_grant(body_of(out, Kind::grant));
    CHECK(grant && grant->integrity == integrity && grant->blocks.front().size() == 2);
  }
}

void claims_say_how_many_ranks_make_one_reader() {
  std::vector<std::byte> out;
  write_claim(out, kAttempt, {.lane = transport::Lane::staged, .end_token = 5});
  const std::size_t alone = body_of(out, Kind::claim).size();
  CHECK(parse_claim(body_of(out, Kind::claim))->ranks == 1);
  out.clear();
  write_claim(out, kAttempt, {.lane = transport::Lane::staged, .end_token = 5, .ranks = 3});
  const auto body = body_of(out, Kind::claim);
  CHECK(body.size() == alone + 4 && parse_claim(body)->ranks == 3);
  for (std::size_t length = alone + 1; length < body.size(); ++length) CHECK(!parse_claim(body.first(length)));
  for (const std::byte few : {std::byte{0}, std::byte{1}}) {  // is written without the field
    out[out.size() - 4] = few;
    CHECK(!parse_claim(body_of(out, Kind::claim)));
  }
  out.back() = std::byte{1};
  CHECK(!parse_claim(body_of(out, Kind::claim)));
}

void a_checksum_that_is_none_is_refused() {
  std::vector<std::byte> out;
  write_claim(out, kAttempt, {.lane = transport::Lane::staged, .end_token = 5, .integrity = Integrity::xxh3});
  out.back() = std::byte{3};
  CHECK(!parse_claim(body_of(out, Kind::claim)));
  out.clear();
  write_grant(out, kAttempt, {.remaining_ms = 1, .num_tokens = 5, .payload = {}, .blocks = {}});
  out[kHeaderBytes + 12] = std::byte{3};
  CHECK(!parse_grant(body_of(out, Kind::grant)));
}

void pieces_are_those_of_fetch() {
  std::vector<std::byte> out;
  write_pieces(out, Kind::check, kAttempt, {.pieces = {{{.block = 4, .token = 1, .tokens = 3}}, {}}});
  const auto body = body_of(out, Kind::check);
  const auto read = parse_pieces(body);
  CHECK(read && read->pieces.size() == 2 && read->pieces[0].size() == 1 && read->pieces[1].empty());
  CHECK(read->pieces[0][0].block == 4 && read->pieces[0][0].token == 1 && read->pieces[0][0].tokens == 3);
  for (std::size_t length = 0; length < body.size(); ++length) CHECK(!parse_pieces(body.first(length)));
}

void sums_say_where_they_begin_and_are_never_empty() {
  const std::array<std::byte, 12> some{std::byte{1}, std::byte{2}};
  std::vector<std::byte> out;
  write_sums(out, kAttempt, {.first_byte = 1U << 20U, .bytes = some});
  const auto body = body_of(out, Kind::sums);
  const auto read = parse_sums(body);
  CHECK(read && read->first_byte == 1U << 20U && read->bytes.size() == some.size());
  CHECK(read->bytes[1] == std::byte{2});
  for (std::size_t length = 0; length <= 8; ++length) CHECK(!parse_sums(body.first(length)));
}

}  // namespace

int main() {
  return test::run({
      {"claims_and_grants_name_a_checksum_or_none", claims_and_grants_name_a_checksum_or_none},
      {"claims_say_how_many_ranks_make_one_reader", claims_say_how_many_ranks_make_one_reader},
      {"a_checksum_that_is_none_is_refused", a_checksum_that_is_none_is_refused},
      {"pieces_are_those_of_fetch", pieces_are_those_of_fetch},
      {"sums_say_where_they_begin_and_are_never_empty", sums_say_where_they_begin_and_are_never_empty},
  });
}
