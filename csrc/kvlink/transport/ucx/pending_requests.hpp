// Operations that UCX has accepted and not finished, and the memory they hold meanwhile.
#pragma once

#include <ucp/api/ucp.h>

#include <list>
#include <memory>

namespace kvlink::transport::ucx {

class Worker;

/// A group of UCX operations with one fate. Derive to add the memory that they use.
///
/// While any operation is outstanding the worker holds this object, so its owner may drop it at any
/// moment: a peer that never answers then costs memory until the worker goes, never a dangling
/// pointer. Made by std::make_shared; progress thread only.
class PendingRequests : public std::enable_shared_from_this<PendingRequests> {
 public:
  PendingRequests() : node_(1) {}
  PendingRequests(const PendingRequests&) = delete;
  PendingRequests& operator=(const PendingRequests&) = delete;
  virtual ~PendingRequests() = default;

  [[nodiscard]] unsigned outstanding() const noexcept { return outstanding_; }
  /// The first failure: the ones after it are echoes of a lost peer. UCS_OK so far otherwise.
  [[nodiscard]] ucs_status_t status() const noexcept { return status_; }

  /// Takes what a ucp_*_nbx call returned. Operations carry `on_complete` and `this` as user data.
  void started(Worker& worker, ucs_status_ptr_t request) noexcept;
  /// The completion callback of sends, gets and closes.
  static void on_complete(void* request, ucs_status_t status, void* user_data) noexcept;
  /// Makes the worker hold this object for as long as it lives. For what UCX refuses to let go.
  void hold(Worker& worker) noexcept;

 private:
  friend class Worker;
  void note(ucs_status_t status) noexcept;
  void let_go() noexcept;

  unsigned outstanding_{0};
  ucs_status_t status_{UCS_OK};
  Worker* worker_{};
  // One list node, allocated ahead so that holding and letting go never allocate: it moves into the
  // worker's list with the first operation outstanding and back with the last.
  std::list<std::shared_ptr<PendingRequests>> node_;
  std::list<std::shared_ptr<PendingRequests>>::iterator position_;  // in the worker's list, while held
};

}  // namespace kvlink::transport::ucx
