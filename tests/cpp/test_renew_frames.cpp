// RENEW on the wire: what is written is read, and nothing else is.
#include <cstddef>
#include <span>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/messages.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

[[nodiscard]] Renewal renewal(std::uint32_t number) {
  return {.attempt = {.handoff = {.epoch = {1, 2, 3}, .sequence = 1000 + number}, .attempt = number},
          .lease_ms = 10 * number};
}

[[nodiscard]] std::vector<std::byte> frame_of(std::uint32_t count) {
  std::vector<Renewal> renewals;
  for (std::uint32_t number = 0; number < count; ++number) renewals.push_back(renewal(number));
  std::vector<std::byte> frame;
  write_renew(frame, renewals);
  return frame;
}

void a_frame_of_any_count_comes_back() {
  for (const std::uint32_t count : {0U, 1U, 500U}) {
    const auto frame = frame_of(count);
    const auto header = parse_header(std::span(frame).first<kHeaderBytes>());
    CHECK(header.has_value());
    CHECK(header->kind == Kind::renew);
    CHECK(header->attempt == AttemptId{});
    CHECK(header->body_bytes == frame.size() - kHeaderBytes);
    const auto read = parse_renew(std::span(frame).subspan(kHeaderBytes));
    CHECK(read.has_value());
    CHECK(read->size() == count);
    for (std::uint32_t number = 0; number < count; ++number) {
      CHECK((*read)[number].attempt == renewal(number).attempt);
      CHECK((*read)[number].lease_ms == renewal(number).lease_ms);
    }
  }
}

void more_than_a_frame_takes_are_in_the_next_one() {
  const auto frames = frame_of(kMaxRenewals + 3);
  std::uint32_t number = 0;
  for (auto rest = std::span<const std::byte>(frames); !rest.empty();) {
    const auto header = parse_header(rest.first<kHeaderBytes>());
    CHECK(header && header->kind == Kind::renew);
    const auto read = parse_renew(rest.subspan(kHeaderBytes, header->body_bytes));
    CHECK(read && !read->empty());
    for (const Renewal& each : *read) CHECK(each.attempt.attempt == number++);
    rest = rest.subspan(kHeaderBytes + header->body_bytes);
  }
  CHECK(number == kMaxRenewals + 3);
}

void a_frame_of_another_length_is_refused() {
  const auto frame = frame_of(3);
  const auto body = std::span(frame).subspan(kHeaderBytes);
  for (std::size_t length = 0; length < body.size(); ++length) CHECK(!parse_renew(body.first(length)));
  auto longer = std::vector<std::byte>(body.begin(), body.end());
  longer.push_back(std::byte{0});
  CHECK(!parse_renew(longer));
}

void a_count_that_no_node_could_mean_is_refused_before_anything_is_allocated() {
  std::vector<std::byte> body(4, std::byte{0xff});
  CHECK(!parse_renew(body));
}

}  // namespace

int main() {
  return test::run({
      {"a_frame_of_any_count_comes_back", a_frame_of_any_count_comes_back},
      {"more_than_a_frame_takes_are_in_the_next_one", more_than_a_frame_takes_are_in_the_next_one},
      {"a_frame_of_another_length_is_refused", a_frame_of_another_length_is_refused},
      {"a_count_that_no_node_could_mean_is_refused_before_anything_is_allocated",
       a_count_that_no_node_could_mean_is_refused_before_anything_is_allocated},
  });
}
