#include "kvlink/transport/ucx/pending_requests.hpp"

#include "kvlink/transport/ucx/worker.hpp"

namespace kvlink::transport::ucx {

void PendingRequests::started(Worker& worker, ucs_status_ptr_t request) noexcept {
  if (!UCS_PTR_IS_PTR(request)) {  // Done or refused on the spot: on_complete will not run.
    note(UCS_PTR_RAW_STATUS(request));
    return;
  }
  if (outstanding_++ == 0) hold(worker);
}

void PendingRequests::on_complete(void* request, ucs_status_t status, void* user_data) noexcept {
  auto* const self = static_cast<PendingRequests*>(user_data);
  self->note(status);
  self->worker_->call().request_free(request);
  if (--self->outstanding_ == 0) self->let_go();
}

void PendingRequests::hold(Worker& worker) noexcept {
  if (node_.empty()) return;  // held already
  worker_ = &worker;
  node_.front() = weak_from_this().lock();
  worker.pending_.splice(worker.pending_.end(), node_);
  position_ = std::prev(worker.pending_.end());
}

void PendingRequests::let_go() noexcept {
  node_.splice(node_.end(), worker_->pending_, position_);
  // The last owner may be the node itself, which lies inside this object: nothing may follow.
  const std::shared_ptr<PendingRequests> self = std::move(node_.front());
}

void PendingRequests::note(ucs_status_t status) noexcept {
  if (status != UCS_OK && status_ == UCS_OK) status_ = status;
}

}  // namespace kvlink::transport::ucx
