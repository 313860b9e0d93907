// What may move at once: windows of bytes, turns between peers, and nothing that waits for ever.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "kvlink/handoff/receive_window.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;

AttemptId attempt(std::uint64_t peer, std::uint32_t number) {
  return {.handoff = {.epoch = {}, .sequence = peer}, .attempt = number};
}

void another_peers_first_part_waits_for_one_transfer_at_most() {
  ReceiveWindow window({.peer_bytes = 1 << 30, .node_bytes = 1 << 30, .transfers = 4});
  for (std::uint32_t i = 0; i < 1000; ++i) window.wait(1, attempt(1, i), 100);
  std::vector<AttemptId> moving;
  while (const auto next = window.next()) moving.push_back(*next);
  CHECK(moving.size() == 4);
  window.wait(2, attempt(2, 0), 100);
  CHECK(window.next() == attempt(2, 0));  // nothing of it moves: it does not even wait for one
  window.wait(2, attempt(2, 1), 100);
  CHECK(!window.next());
  window.leave(moving[0]);  // five were moving, four may
  CHECK(!window.next());
  window.leave(moving[1]);
  const auto first = window.next();
  window.leave(moving[2]);
  const auto second = window.next();
  CHECK(first && second);
  CHECK(first->handoff.sequence != second->handoff.sequence);  // turn and turn about, whoever waits with a thousand
}

void parts_of_one_peer_start_in_their_order() {
  ReceiveWindow window({.peer_bytes = 250, .node_bytes = 1000, .transfers = 16});
  for (std::uint32_t i = 0; i < 5; ++i) window.wait(1, attempt(1, i), 100);
  CHECK(window.next() == attempt(1, 0));
  CHECK(window.next() == attempt(1, 1));
  CHECK(!window.next());
  CHECK(window.moving_bytes() == 200);
  window.leave(attempt(1, 2));  // one that waits is cancelled
  window.leave(attempt(1, 2));
  window.leave(attempt(1, 0));
  CHECK(window.next() == attempt(1, 3));
  CHECK(!window.next());
}

void a_part_larger_than_a_window_moves_alone() {
  ReceiveWindow window({.peer_bytes = 100, .node_bytes = 300, .transfers = 16});
  window.wait(1, attempt(1, 0), 50);
  window.wait(1, attempt(1, 1), 1000);
  window.wait(2, attempt(2, 0), 50);
  window.wait(2, attempt(2, 1), 50);
  CHECK(window.next() == attempt(1, 0));
  CHECK(window.next() == attempt(2, 0));
  CHECK(window.next() == attempt(2, 1));
  CHECK(!window.next());
  window.leave(attempt(1, 0));  // its peer's window is empty, but not the node's
  window.wait(3, attempt(3, 0), 10);
  CHECK(!window.next());  // and no small one overtakes it there, or it might wait for ever
  window.leave(attempt(2, 0));
  CHECK(!window.next());
  window.leave(attempt(2, 1));
  CHECK(window.next() == attempt(1, 1));
  CHECK(!window.next());
  window.leave(attempt(1, 1));
  CHECK(window.next() == attempt(3, 0));
}

void peers_that_stand_still_keep_nobody_out() {
  ReceiveWindow window({.peer_bytes = 1 << 20, .node_bytes = 1 << 30, .transfers = 2});
  for (std::uint64_t peer = 1; peer <= 50; ++peer) {
    for (std::uint32_t i = 0; i < 3; ++i) window.wait(peer, attempt(peer, i), 10);
    CHECK(window.next().has_value());
  }
}

/// Random arrivals and departures, against the promises written out.
void everything_starts_once_inside_the_windows_whatever_comes_and_goes() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const WindowLimits limits{.peer_bytes = 1 + random() % 500, .node_bytes = 1 + random() % 1000, .transfers = 4};
    ReceiveWindow window(limits);
    std::map<AttemptId, std::uint64_t> bytes;
    std::vector<AttemptId> waiting;
    std::vector<AttemptId> moving;
    std::uint32_t number = 0;
    for (int step = 0; step < 400 || !waiting.empty() || !moving.empty(); ++step) {
      if (step < 400 && random() % 2 == 0) {
        const AttemptId made = attempt(1 + random() % 5, ++number);
        bytes[made] = random() % 700;
        window.wait(made.handoff.sequence, made, bytes[made]);
        waiting.push_back(made);
      }
      auto& from = random() % 4 == 0 ? waiting : moving;
      if (!from.empty()) {
        const auto gone = from.begin() + static_cast<std::ptrdiff_t>(random() % from.size());
        window.leave(*gone);
        from.erase(gone);
      }
      while (const auto next = window.next()) {
        const auto place = std::ranges::find(waiting, *next);
        if (place == waiting.end()) std::fprintf(stderr, "seed %u\n", seed);
        CHECK(place != waiting.end());
        waiting.erase(place);
        moving.push_back(*next);
      }
      std::map<std::uint64_t, std::vector<std::uint64_t>> moved;  // by peer; 0 stands for the node
      for (const AttemptId& each : moving) {
        if (bytes[each] == 0) continue;
        moved[each.handoff.sequence].push_back(bytes[each]);
        moved[0].push_back(bytes[each]);
      }
      for (const auto& [peer, parts] : moved) {
        const auto sum = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
        if (peer == 0) CHECK(window.moving_bytes() == sum);
        CHECK(parts.size() == 1 || sum <= (peer == 0 ? limits.node_bytes : limits.peer_bytes));
      }
      CHECK(waiting.empty() || !moving.empty());  // something always moves
    }
  }
}

}  // namespace

int main() {
  return kvlink::test::run({{"another peer's first part waits for one transfer at most",
                             another_peers_first_part_waits_for_one_transfer_at_most},
                            {"parts of one peer start in their order", parts_of_one_peer_start_in_their_order},
                            {"a part larger than a window moves alone", a_part_larger_than_a_window_moves_alone},
                            {"peers that stand still keep nobody out", peers_that_stand_still_keep_nobody_out},
                            {"everything starts once, inside the windows, whatever comes and goes",
                             everything_starts_once_inside_the_windows_whatever_comes_and_goes}});
}
