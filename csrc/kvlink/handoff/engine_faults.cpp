// The door through which tests make a node's lanes go wrong.
#include <chrono>
#include <future>

#include "kvlink/handoff/engine.hpp"

namespace kvlink::handoff {

std::shared_ptr<const transport::FaultCounts> Engine::inject_faults(
    const std::optional<transport::FaultScript>& script) {
  auto counts = std::make_shared<transport::FaultCounts>();
  std::shared_ptr<transport::Faults> faults;
  if (script) faults = std::make_shared<transport::Faults>(*script, counts, services_.waker);
  // Returns once it holds: what a peer says next may start a transfer before a task of this thread runs.
  auto promise = std::make_shared<std::promise<void>>();
  auto holds = promise->get_future();
  post([this, faults, promise] {
    services_.faults = faults;
    promise->set_value();
  });
  if (holds.wait_for(std::chrono::seconds(10)) != std::future_status::ready) {
    throw Error(Code::busy, "the progress thread did not take the faults within 10 s");
  }
  return counts;
}

}  // namespace kvlink::handoff
