// The door through which tests make a node's lanes go wrong.
#include "kvlink/handoff/engine.hpp"

namespace kvlink::handoff {

std::shared_ptr<const transport::FaultCounts> Engine::inject_faults(
    const std::optional<transport::FaultScript>& script) {
  auto counts = std::make_shared<transport::FaultCounts>();
  std::shared_ptr<transport::Faults> faults;
  if (script) faults = std::make_shared<transport::Faults>(*script, counts, services_.waker);
  post([this, faults] { services_.faults = faults; });
  return counts;
}

}  // namespace kvlink::handoff
