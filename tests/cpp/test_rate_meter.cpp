// What a peer's bandwidth is made of: the time in which anything moved, and more of the present than of the past.
#include <cstdint>

#include "check.hpp"
#include "kvlink/handoff/rate_meter.hpp"

namespace {

using namespace kvlink;
using kvlink::handoff::RateMeter;

constexpr std::int64_t kMs = 1'000'000;

[[nodiscard]] bool near(double value, double expected) {
  return value > 0.99 * expected && value < 1.01 * expected;
}

void nothing_is_measured_before_something_has_moved() {
  RateMeter meter;
  CHECK(meter.bytes_per_s() == 0);
  meter.begin(5 * kMs);
  CHECK(meter.bytes_per_s() == 0);
}

void idle_time_does_not_count() {
  RateMeter meter;
  meter.begin(0);
  meter.end(10 * kMs, 1000);
  meter.begin(1'000'000 * kMs);
  meter.end(1'000'010 * kMs, 3000);
  CHECK(near(meter.bytes_per_s(), 4000 / 0.02));
}

void what_moves_side_by_side_adds_up() {
  RateMeter meter;
  for (int transfer = 0; transfer < 4; ++transfer) meter.begin(transfer * kMs);
  for (int transfer = 0; transfer < 4; ++transfer) meter.end((10 + transfer) * kMs, 1000);
  CHECK(near(meter.bytes_per_s(), 4000 / 0.013));
}

void a_transfer_that_brought_nothing_costs_its_time() {
  RateMeter meter;
  meter.begin(0);
  meter.end(10 * kMs, 1000);
  meter.begin(20 * kMs);
  meter.end(30 * kMs, 0);
  CHECK(near(meter.bytes_per_s(), 1000 / 0.02));
}

void the_present_outweighs_the_past() {
  RateMeter meter;
  std::int64_t now = 0;
  const auto move = [&](std::uint64_t bytes, int times) {
    for (int i = 0; i < times; ++i, now += 100 * kMs) {
      meter.begin(now);
      meter.end(now + 100 * kMs, bytes);
    }
  };
  move(1'000'000, 1000);
  CHECK(near(meter.bytes_per_s(), 1e7));
  move(4'000'000, 100);  // ten seconds of moving
  CHECK(meter.bytes_per_s() > 3.9e7);
  meter.begin(now);
  meter.end(now + 3'600'000 * kMs, 0);  // one that stood still for an hour is one of many
  CHECK(meter.bytes_per_s() < 1e5);
  now += 3'600'000 * kMs;
  move(4'000'000, 100);
  CHECK(meter.bytes_per_s() > 3.8e7);
}

}  // namespace

int main() {
#define NAMED(test) \
  {                 \
    #test, test     \
  }
  return test::run({
      NAMED(nothing_is_measured_before_something_has_moved),
      NAMED(idle_time_does_not_count),
      NAMED(what_moves_side_by_side_adds_up),
      NAMED(a_transfer_that_brought_nothing_costs_its_time),
      NAMED(the_present_outweighs_the_past),
  });
}
