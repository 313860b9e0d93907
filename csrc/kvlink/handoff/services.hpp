// What both books of a node share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kvlink/handoff/handoff.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/private_workers.hpp"
#include "kvlink/handoff/quarantine.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/plan/template.hpp"
#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/fault_script.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"
#include "kvlink/transport/ucx/worker.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::handoff {

struct Counters {
  std::atomic<std::uint64_t> offers{0};
  std::atomic<std::uint64_t> pulls{0};
  std::atomic<std::uint64_t> reservations{0};
  std::atomic<std::uint64_t> pushes{0};
  std::atomic<std::uint64_t> succeeded{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::uint64_t> refused_claims{0};
  std::atomic<std::uint64_t> stale_messages{0};
  std::atomic<std::uint64_t> protocol_errors{0};
  std::atomic<std::uint64_t> bytes_pulled{0};
  std::atomic<std::uint64_t> live{0};
};

/// Made once by the engine. Members are in release order: threads that touch memory end before what they touch.
struct Services {
  Epoch epoch{};
  std::shared_ptr<const Bells> bells;
  std::shared_ptr<const transport::LocalMemory> memory;
  std::shared_ptr<Holds> holds;
  Quarantine quarantine;
  /// This cache paired with itself: says what a pull wants whose source never told its layout. Null: that stays unsaid.
  std::shared_ptr<const plan::Template> own_template;
  Counters counters;
  transport::Waker waker;
  std::shared_ptr<transport::ucx::Worker> ucx;  // null where UCX is not used
  /// To nodes of this host, by their address; they outlive connections. Progress thread. Cleared before `ucx`.
  std::map<std::vector<std::byte>, std::shared_ptr<transport::ucx::Endpoint>> endpoints;
  PrivateWorkers private_workers;  // likewise
  std::shared_ptr<transport::ChunkRouter> router;
  std::unique_ptr<transport::CopyThreads> copy_threads;
  std::shared_ptr<transport::Faults> faults;  // null but in tests
};

}  // namespace kvlink::handoff
