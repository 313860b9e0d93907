// UCX workers that serve one peer each, so that no peer of this host can stop what others send.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvlink/transport/poller.hpp"
#include "kvlink/transport/ucx/worker.hpp"

namespace kvlink::handoff {

/// A worker's shared-memory queue is written by everyone who sends to it: a peer that is killed while it writes leaves
/// a gap behind which nothing arrives any more, from nobody; and endpoints in mode `none` leave mappings behind until
/// their worker ends. So what UCX does between nodes of one host has workers of its own on both sides, which end with
/// the peer; for gets only the reader's, since they write nothing into the source's queue.
/// Progress thread only.
class PrivateWorkers {
 public:
  /// Lives until nobody but this object holds it. Throws as `Worker::create`.
  [[nodiscard]] std::shared_ptr<transport::ucx::Worker> add(const transport::ucx::Worker& like);

  /// Moves what can move, and ends workers that are not needed any more. Returns the number of events handled.
  unsigned progress(transport::Poller& poller) noexcept;
  /// Whether the thread may now sleep on `poller`, which watches all of them from then on under `token`.
  [[nodiscard]] bool arm(transport::Poller& poller, std::uint64_t token) noexcept;
  void clear(transport::Poller& poller) noexcept;

 private:
  struct Each {
    std::shared_ptr<transport::ucx::Worker> worker;
    bool watched{false};
  };
  std::vector<Each> all_;
};

}  // namespace kvlink::handoff
