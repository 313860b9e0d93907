#include "kvlink/handoff/private_workers.hpp"

#include <algorithm>

#include "kvlink/error.hpp"

namespace kvlink::handoff {

using transport::ucx::Worker;

std::shared_ptr<Worker> PrivateWorkers::add(const Worker& like) {
  auto worker = like.sibling();
  all_.push_back({.worker = worker});
  return worker;
}

unsigned PrivateWorkers::progress(transport::Poller& poller) noexcept {
  unsigned events = 0;
  for (const Each& each : all_) events += each.worker->progress();
  // Only this thread hands out further owners, so that one which is alone stays alone.
  std::erase_if(all_, [&](const Each& each) {
    if (each.worker.use_count() != 1) return false;
    if (each.watched) poller.forget(each.worker->event_fd());
    return true;
  });
  return events;
}

bool PrivateWorkers::arm(transport::Poller& poller, std::uint64_t token) noexcept {
  bool armed = true;
  for (Each& each : all_) {
    if (!each.watched) {
      try {
        poller.watch(each.worker->event_fd(), token);
        each.watched = true;
      } catch (const Error&) {
        armed = false;  // Out of memory for it: looked at again and again instead.
      }
    }
    armed = each.worker->arm() && armed;
  }
  return armed;
}

void PrivateWorkers::clear(transport::Poller& poller) noexcept {
  for (const Each& each : all_) {
    if (each.watched) poller.forget(each.worker->event_fd());
  }
  all_.clear();
}

}  // namespace kvlink::handoff
