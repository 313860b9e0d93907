// Ids that have ended: exact within a window, refused outside of it, and never taken for new again.
//
// With an argument: the seed of the random order.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/retired_ids.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

std::uint64_t seed = 20;

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
constexpr Epoch kOwn{1};

[[nodiscard]] Epoch mint(std::uint32_t number) {
  Epoch epoch{2};
  for (std::size_t i = 0; i < 4; ++i) epoch[i + 4] = static_cast<std::uint8_t>(number >> (8 * i));
  return epoch;
}

/// Sequences that end in about their order, some never: as offers do.
void what_has_ended_is_known_exactly() {
  std::mt19937_64 random(seed);
  for (int round = 0; round < 40; ++round) {
    EndedSequences ended;
    std::set<std::uint64_t> model;
    const std::uint64_t first = round % 4 == 0 ? 1 : random() % 1000;
    std::vector<std::uint64_t> order(2000);
    std::iota(order.begin(), order.end(), std::max<std::uint64_t>(1, first));
    for (std::size_t at = 0; at < order.size(); at += 200) {
      std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(at),
                   order.begin() + static_cast<std::ptrdiff_t>(std::min(order.size(), at + 300)), random);
    }
    const std::uint64_t left_out = round % 3 == 0 ? 0 : 2 + random() % 50;  // every so manieth never ends
    for (const std::uint64_t sequence : order) {
      if (left_out != 0 && sequence % left_out == 1) continue;
      CHECK(ended.contains(sequence) == model.contains(sequence));
      ended.add(sequence);
      if (random() % 4 == 0) ended.add(sequence);
      model.insert(sequence);
    }
    for (std::uint64_t sequence = 1; sequence < 4000; ++sequence) {
      CHECK(ended.contains(sequence) == model.contains(sequence));
    }
    CHECK(ended.contains(0));
  }
}

void what_lies_far_behind_the_newest_counts_as_ended() {
  EndedSequences ended;
  ended.add(10);
  CHECK(!ended.contains(9));
  const std::uint64_t newest = 5 * EndedSequences::kBitmap + 17;
  ended.add(newest);
  CHECK(ended.contains(9) && ended.contains(10));
  CHECK(ended.contains(newest - EndedSequences::kBitmap - 64));
  CHECK(!ended.contains(newest - EndedSequences::kBitmap + 64));  // in the bitmap, and not ended
  CHECK(!ended.contains(newest - 1) && ended.contains(newest) && !ended.contains(newest + 1));
  ended.add(newest - 100);
  CHECK(ended.contains(newest - 100) && !ended.contains(newest - 99));
}

void the_last_numbers_do_not_wrap_around() {
  EndedSequences ended;
  for (std::uint64_t sequence = kMost; sequence > kMost - 200; --sequence) ended.add(sequence);
  for (std::uint64_t sequence = kMost; sequence > kMost - 200; --sequence) CHECK(ended.contains(sequence));
  CHECK(ended.contains(1) && ended.contains(0));
  CHECK(!ended.contains(kMost - 1000));
}

void epochs_do_not_mix() {
  RetiredIds retired(kOwn);
  retired.add({kOwn, 7});
  retired.use(mint(1));
  retired.add({mint(1), 8});
  CHECK(retired.look_up({kOwn, 7}) == Retirement::ended);
  CHECK(retired.look_up({kOwn, 8}) == Retirement::none);
  CHECK(retired.look_up({mint(1), 7}) == Retirement::none);
  CHECK(retired.look_up({mint(1), 8}) == Retirement::ended);
  CHECK(retired.look_up({mint(2), 8}) == Retirement::none);
}

/// The mint that was used longest ago goes first, and all that it ever made is refused from then on.
void a_forgotten_mint_is_refused() {
  RetiredIds retired(kOwn);
  retired.add({kOwn, 1});
  constexpr auto most = static_cast<std::uint32_t>(RetiredIds::kMints);
  for (std::uint32_t number = 0; number < most; ++number) {
    retired.use(mint(number));
    retired.add({mint(number), 5});
  }
  retired.use(mint(0));
  for (std::uint32_t number = 0; number < most; ++number) {
    CHECK(retired.look_up({mint(number), 5}) == Retirement::ended);
    CHECK(retired.look_up({mint(number), 6}) == Retirement::none);
  }
  retired.use(mint(most));
  CHECK(retired.look_up({mint(0), 6}) == Retirement::none);
  CHECK(retired.look_up({mint(1), 5}) == Retirement::mint_forgotten);
  CHECK(retired.look_up({mint(1), 6}) == Retirement::mint_forgotten);
  retired.add({mint(1), 6});  // an offer that lived while its mint was forgotten
  CHECK(retired.look_up({mint(1), 7}) == Retirement::mint_forgotten);
  CHECK(retired.look_up({mint(2), 6}) == Retirement::none);
  CHECK(retired.look_up({kOwn, 1}) == Retirement::ended);
  CHECK(retired.look_up({kOwn, 2}) == Retirement::none);
}

void past_the_last_mint_nothing_new_is_taken() {
  RetiredIds retired(kOwn);
  constexpr auto most = static_cast<std::uint32_t>(RetiredIds::kMints + RetiredIds::kForgotten);
  for (std::uint32_t number = 0; number < most; ++number) {
    CHECK(retired.look_up({mint(number), 1}) == Retirement::none);
    retired.use(mint(number));
  }
  CHECK(retired.look_up({mint(most), 1}) == Retirement::too_many_mints);
  CHECK(retired.look_up({mint(0), 1}) == Retirement::mint_forgotten);
  CHECK(retired.look_up({mint(most - 1), 1}) == Retirement::none);  // those that are remembered go on
  CHECK(retired.look_up({kOwn, 1}) == Retirement::none);
  for (const Retirement each : {Retirement::ended, Retirement::mint_forgotten, Retirement::too_many_mints}) {
    CHECK(why_retired(each)[0] != '\0');
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2) seed = std::strtoull(argv[1], nullptr, 10);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
#define NAMED(test) \
  {                 \
    #test, test     \
  }
  return test::run({
      NAMED(what_has_ended_is_known_exactly),
      NAMED(what_lies_far_behind_the_newest_counts_as_ended),
      NAMED(the_last_numbers_do_not_wrap_around),
      NAMED(epochs_do_not_mix),
      NAMED(a_forgotten_mint_is_refused),
      NAMED(past_the_last_mint_nothing_new_is_taken),
  });
}
