// PUSH, READY, COMMIT and DECLINE on the wire, and FETCH of some layers: what is written is read, and nothing else is.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/messages.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

using Bytes = std::span<const std::byte>;

const AttemptId kAttempt{.handoff = {.epoch = {1, 2, 3}, .sequence = 77}, .attempt = 5};

[[nodiscard]] Header header_of(const std::vector<std::byte>& frame, Kind kind) {
  const auto header = parse_header(std::span(frame).first<kHeaderBytes>());
  CHECK(header.has_value());
  CHECK(header->kind == kind);
  CHECK(header->body_bytes == frame.size() - kHeaderBytes);
  return *header;
}

/// Neither a shorter nor a longer body is read.
void check_length(Bytes body, const std::function<bool(Bytes)>& reads) {
  CHECK(reads(body));
  for (std::size_t length = 0; length < body.size(); ++length) CHECK(!reads(body.first(length)));
  std::vector<std::byte> longer(body.begin(), body.end());
  longer.push_back(std::byte{1});
  CHECK(!reads(longer));
}

void a_push_comes_back() {
  std::vector<std::byte> frame;
  write_push(frame, kAttempt.handoff, {.offer = {.epoch = {9}, .sequence = 4}, .num_tokens = 12});
  const AttemptId reservation{.handoff = kAttempt.handoff, .attempt = 0};
  CHECK(header_of(frame, Kind::push).attempt == reservation);
  const auto body = Bytes(frame).subspan(kHeaderBytes);
  const auto push = parse_push(body);
  CHECK(push && push->num_tokens == 12);
  CHECK((push->offer == HandoffId{.epoch = {9}, .sequence = 4}));
  check_length(body, [](Bytes bytes) { return parse_push(bytes).has_value(); });
}

void what_is_ready_comes_back() {
  std::vector<std::byte> frame;
  const Ready ready{.layers = {{.first = 0, .end = 2}, {.first = 5, .end = 6}},
                    .first_token = 3,
                    .end_token = 9,
                    .blocks = {{4, -1}, {}, {7}}};
  write_ready(frame, kAttempt, ready);
  CHECK(header_of(frame, Kind::ready).attempt == kAttempt);
  const auto body = Bytes(frame).subspan(kHeaderBytes);
  const auto read = parse_ready(body);
  CHECK(read && read->layers == ready.layers && read->blocks == ready.blocks);
  CHECK(read->first_token == 3 && read->end_token == 9);
  check_length(body, [](Bytes bytes) { return parse_ready(bytes).has_value(); });
}

void layers_out_of_order_are_refused() {
  const std::vector<std::vector<LayerRange>> wrong{{{.first = 1, .end = 1}},
                                                   {{.first = 2, .end = 1}},
                                                   {{.first = 0, .end = 2}, {.first = 1, .end = 3}},
                                                   {{.first = 4, .end = 5}, {.first = 0, .end = 1}}};
  for (const auto& layers : wrong) {
    std::vector<std::byte> frame;
    write_ready(frame, kAttempt, {.layers = layers, .first_token = 0, .end_token = 1, .blocks = {}});
    CHECK(!parse_ready(Bytes(frame).subspan(kHeaderBytes)));
  }
  std::vector<std::byte> backwards;
  write_ready(backwards, kAttempt, {.layers = {}, .first_token = 2, .end_token = 1, .blocks = {}});
  CHECK(!parse_ready(Bytes(backwards).subspan(kHeaderBytes)));
}

void a_commit_comes_back_and_has_a_largest_payload() {
  std::vector<std::byte> frame;
  const std::vector<std::byte> payload{std::byte{1}, std::byte{2}};
  write_commit(frame, kAttempt, payload);
  CHECK(header_of(frame, Kind::commit).attempt == kAttempt);
  CHECK(parse_commit(Bytes(frame).subspan(kHeaderBytes)) == payload);
  CHECK(parse_commit({}) == std::vector<std::byte>{});
  CHECK(!parse_commit(std::vector<std::byte>(kMaxPayloadBytes + 1)));
}

void a_decline_comes_back() {
  std::vector<std::byte> frame;
  write_decline(frame, kAttempt.handoff, {Code::already_claimed, "taken"});
  CHECK(header_of(frame, Kind::decline).attempt.handoff == kAttempt.handoff);
  const auto body = Bytes(frame).subspan(kHeaderBytes);
  const auto decline = parse_refuse(body);
  CHECK(decline && decline->code == Code::already_claimed && decline->message == "taken");
  check_length(body, [](Bytes bytes) { return parse_refuse(bytes).has_value(); });
}

void a_fetch_of_some_layers_comes_back() {
  Fetch fetch;
  fetch.pieces = {{{.block = 3, .token = 1, .tokens = 2}}};
  fetch.chunk_address = {std::byte{8}};
  std::vector<std::byte> all;
  write_pieces(all, Kind::fetch, kAttempt, fetch);
  CHECK(parse_pieces(Bytes(all).subspan(kHeaderBytes))->layers.empty());
  fetch.layers = {{.first = 2, .end = 4}};
  std::vector<std::byte> some;
  write_pieces(some, Kind::fetch, kAttempt, fetch);
  const auto body = Bytes(some).subspan(kHeaderBytes);
  CHECK(parse_pieces(body)->layers == fetch.layers);
  CHECK(!parse_pieces(body.first(body.size() - 1)));
}

void a_count_that_no_node_could_mean_is_refused_before_anything_is_allocated() {
  std::vector<std::byte> body(16 + 4, std::byte{0xff});
  std::fill(body.begin(), body.begin() + 16, std::byte{0});
  CHECK(!parse_ready(body));
}

}  // namespace

int main() {
#define NAMED(test) \
  {                 \
    #test, test     \
  }
  return test::run({NAMED(a_push_comes_back), NAMED(what_is_ready_comes_back), NAMED(layers_out_of_order_are_refused),
                    NAMED(a_commit_comes_back_and_has_a_largest_payload), NAMED(a_decline_comes_back),
                    NAMED(a_fetch_of_some_layers_comes_back),
                    NAMED(a_count_that_no_node_could_mean_is_refused_before_anything_is_allocated)});
}
