// One UCX endpoint: this worker's way to one peer's worker.
#pragma once

#include <ucp/api/ucp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/transport/ucx/worker.hpp"

namespace kvlink::transport::ucx {

/// How UCX treats the peer's death. Both sides of a connection must choose the same.
enum class FailureMode : std::uint8_t {
  none,  // same host: the only mode with shared-memory and CMA lanes; silence is not noticed
  peer,  // network: operations to a dead peer fail, and never end this process
};

/// Progress thread only.
class Endpoint {
 public:
  /// `address` is what the peer's Worker::address() gave, taken as hostile; `peer` names it in messages.
  /// Nothing is sent before the first use. Throws Error(lane_unavailable) when no transport reaches the
  /// peer, Error(transport_failed) when one does not any more, or Error(protocol_error) when the address cannot be one.
  Endpoint(std::shared_ptr<Worker> worker, std::span<const std::byte> address, FailureMode mode, std::string peer);
  /// Closes without waiting: the worker finishes the close, and reports what UCX refused.
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  /// Why UCX gave the peer up, if it has. In mode none a dead peer may never be noticed here.
  [[nodiscard]] std::optional<Failure> failure() const;
  [[nodiscard]] bool failed() const noexcept;

  /// Starts to close; in mode peer everything outstanding fails at once. Idempotent. Keys of this
  /// endpoint must be gone before.
  void start_close() noexcept;
  /// Whether UCX has let go of the endpoint: nothing of this node's will reach the peer through it.
  [[nodiscard]] bool closed() const noexcept;

  /// Transports and devices in use, such as `"cma/memory posix/memory"`; asks UCX each time.
  [[nodiscard]] std::string transports() const;
  /// Whether UCX reads the peer's memory itself (CMA, xpmem, RDMA). If not, a get is emulated by
  /// messages that the peer must answer, and kvlink does not use it.
  [[nodiscard]] bool reads_remote_memory() const;

  [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
  [[nodiscard]] FailureMode mode() const noexcept { return mode_; }
  [[nodiscard]] Worker& worker() const noexcept { return *worker_; }
  [[nodiscard]] const std::shared_ptr<Worker>& shared_worker() const noexcept { return worker_; }
  [[nodiscard]] const Functions& call() const noexcept { return worker_->call(); }
  /// Null once closing.
  [[nodiscard]] ucp_ep_h raw() const noexcept;

  /// Sends one eager message for the peer's ChunkRouter. `header` and `payload` belong to `message`,
  /// which learns of the outcome. Never waits.
  void start_message(PendingRequests& message, std::span<const std::byte> header,
                     std::span<const std::byte> payload) noexcept;

 private:
  struct State;  // outlives this object until UCX has let go of the endpoint
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> lanes() const;

  std::shared_ptr<Worker> worker_;
  std::string peer_;
  FailureMode mode_;
  std::shared_ptr<State> state_;
};

}  // namespace kvlink::transport::ucx
