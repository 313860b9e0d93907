// One UCX worker: the queue of everything that a node sends and receives through UCX.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/transport/received_data.hpp"
#include "kvlink/transport/ucx/context.hpp"
#include "kvlink/transport/ucx/pending_requests.hpp"

namespace kvlink::transport {
class ChunkRouter;
}

namespace kvlink::transport::ucx {

/// Made on any thread; from then on every method but `address` and `release` runs on the progress
/// thread only. Endpoints and received data hold their worker, so it is destroyed after them.
class Worker : public ReceivedData::Owner, public std::enable_shared_from_this<Worker> {
 public:
  /// Chunks that arrive are given to `router`. Throws Error(ucx_unavailable).
  [[nodiscard]] static std::shared_ptr<Worker> create(std::shared_ptr<Context> context,
                                                      std::shared_ptr<ChunkRouter> router);
  /// Another one like it, for the same router. Throws as `create`.
  [[nodiscard]] std::shared_ptr<Worker> sibling() const { return create(context_, router_); }
  ~Worker() override;

  /// What a peer needs to make an endpoint to this worker. Fixed for the worker's life; any thread.
  [[nodiscard]] std::span<const std::byte> address() const noexcept { return address_; }
  /// Readable when an armed worker has something to do. Watch it, never read from it.
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }

  /// Moves what can move and runs callbacks; never waits. Returns the number of events handled.
  unsigned progress() noexcept;
  /// Whether the thread may now sleep on `event_fd`; false: call `progress` again first.
  [[nodiscard]] bool arm() noexcept;

  /// Makes `event_fd` readable.
  void wake() noexcept { call().worker_signal(raw()); }

  /// Operations that UCX still holds, of all endpoints, closing ones included.
  [[nodiscard]] std::size_t pending_count() const noexcept { return pending_.size(); }
  [[nodiscard]] ChunkRouter& router() const noexcept { return *router_; }
  [[nodiscard]] Context& context() const noexcept { return *context_; }
  [[nodiscard]] const Functions& call() const noexcept { return context_->call(); }
  [[nodiscard]] ucp_worker_h raw() const noexcept { return raw_.get(); }

  /// Takes back bytes that a receiver is done with. Any thread; they go to UCX on the next `progress`.
  void release(const void* data) noexcept override;

 private:
  friend class PendingRequests;
  struct Destroy {
    const Functions* call{};
    void operator()(ucp_worker_h worker) const noexcept { call->worker_destroy(worker); }
  };
  Worker(std::shared_ptr<Context> context, std::shared_ptr<ChunkRouter> router);
  static ucs_status_t on_message(void* arg, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t data_bytes, const ucp_am_recv_param_t* param) noexcept;
  void give_back_released() noexcept;

  std::shared_ptr<Context> context_;
  std::shared_ptr<ChunkRouter> router_;
  std::list<std::shared_ptr<PendingRequests>> pending_;
  std::unique_ptr<ucp_worker, Destroy> raw_;
  std::vector<std::byte> address_;
  int event_fd_{-1};
  std::size_t lent_{0};  // messages that receivers hold; progress thread only
  std::mutex released_mutex_;
  std::vector<const void*> released_;     // guarded by released_mutex_
  std::vector<const void*> giving_back_;  // progress thread only; swapped with released_
};

}  // namespace kvlink::transport::ucx
