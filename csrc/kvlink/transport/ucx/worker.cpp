#include "kvlink/transport/ucx/worker.hpp"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/transport/chunk_router.hpp"
#include "kvlink/transport/ucx/status.hpp"
#include "kvlink/transport/unique_fd.hpp"

namespace kvlink::transport::ucx {
namespace {

constexpr unsigned kChunkMessage = 0;

// Messages lent to receivers at once. A receiver's own window is far below; this bounds them together,
// and lets `release` work without allocating.
constexpr std::size_t kMaxLent = 4096;

// What a worker opens, and then some. Its first endpoints need a few more, and report that they lack them.
constexpr std::size_t kDescriptors = 24;

/// UCX 1.22 ends the process by an assertion if it finds no free descriptor while it starts its thread, so it is not
/// asked to without any. Another thread may still take them in between; that is as good as it gets.
void check_descriptors() {
  std::vector<UniqueFd> room;
  while (room.size() < kDescriptors) {
    room.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (room.back()) continue;
    const int error = errno;
    throw Error(Code::out_of_memory, "create a UCX worker, which needs " + std::to_string(kDescriptors) +
                                         " descriptors: " + std::strerror(error) +
                                         "; raise the limit on open files (ulimit -n)");
  }
}

ucp_worker_h create_raw(const Context& context) {
  check_descriptors();
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made on one thread, used on another
  ucp_worker_h worker = nullptr;
  const ucs_status_t status = context.call().worker_create(context.raw(), &params, &worker);
  if (status != UCS_OK) {
    Failure failure = failure_of(context.library(), status, "create a UCX worker");
    // A worker needs nothing but what this machine has. UCX gives one status or another for either, and says no more.
    if (failure.code == Code::transport_failed) failure.code = Code::out_of_memory;
    throw Error(failure.code,
                failure.message + "; is /dev/shm full or read-only, or the limit on open files (ulimit -n) reached?");
  }
  return worker;
}

std::vector<std::byte> address_of(const Context& context, ucp_worker_h worker) {
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  check(context.library(), context.call().worker_get_address(worker, &address, &bytes), "get the UCX worker's address");
  const auto* const begin = reinterpret_cast<const std::byte*>(address);
  std::vector<std::byte> copy(begin, begin + bytes);
  context.call().worker_release_address(worker, address);
  return copy;
}

int event_fd_of(const Context& context, ucp_worker_h worker) {
  int fd = -1;
  check(context.library(), context.call().worker_get_efd(worker, &fd), "get the UCX worker's event descriptor");
  return fd;
}

}  // namespace

std::shared_ptr<Worker> Worker::create(std::shared_ptr<Context> context, std::shared_ptr<ChunkRouter> router) {
  return std::shared_ptr<Worker>(new Worker(std::move(context), std::move(router)));
}

Worker::Worker(std::shared_ptr<Context> context, std::shared_ptr<ChunkRouter> router)
    : context_(std::move(context)),
      router_(std::move(router)),
      raw_(create_raw(*context_), Destroy{&context_->call()}),
      address_(address_of(*context_, raw_.get())),
      event_fd_(event_fd_of(*context_, raw_.get())) {
  released_.reserve(kMaxLent);
  giving_back_.reserve(kMaxLent);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kChunkMessage;
  // Not persistent: UCX would copy a message that it received into its own buffer once more, to be able to lend it.
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &Worker::on_message;
  handler.arg = this;
  check(context_->library(), call().worker_set_am_recv_handler(raw(), &handler), "set the message handler");
}

Worker::~Worker() {
  // Closes that only wait for a turn get a few; one that waits for a dead peer must not keep us.
  constexpr int kTurns = 64;
  for (int turn = 0; turn < kTurns && !pending_.empty(); ++turn) call().worker_progress(raw());
  give_back_released();
  raw_.reset();  // may still complete requests, hence before pending_ goes
  for (auto& pending : pending_) pending->outstanding_ = 0;
}

unsigned Worker::progress() noexcept {
  give_back_released();
  return call().worker_progress(raw());
}

bool Worker::arm() noexcept {
  // Another failure than BUSY would repeat for ever: sleeping with a bounded timeout beats spinning on it.
  return call().worker_arm(raw()) != UCS_ERR_BUSY;
}

void Worker::release(const void* data) noexcept {
  const std::lock_guard lock(released_mutex_);
  released_.push_back(data);  // never allocates: lent_ <= kMaxLent
}

void Worker::give_back_released() noexcept {
  {
    const std::lock_guard lock(released_mutex_);
    giving_back_.swap(released_);
  }
  for (const void* data : giving_back_) call().am_data_release(raw(), const_cast<void*>(data));
  lent_ -= giving_back_.size();
  giving_back_.clear();
}

ucs_status_t Worker::on_message(void* arg, const void* header, std::size_t header_bytes, void* data,
                                std::size_t data_bytes, const ucp_am_recv_param_t* param) noexcept {
  auto& worker = *static_cast<Worker*>(arg);
  // A rendezvous would let the peer choose when this node fetches, and how much: chunks are always eager.
  // Returning without receiving drops it.
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const std::span<const std::byte> head(static_cast<const std::byte*>(header), header_bytes);
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), data_bytes);
  if (rendezvous || bytes.empty()) {
    worker.router_->refuse();
    return UCS_OK;
  }
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) == 0) {
    worker.router_->deliver(head, ReceivedData::shown(bytes));
    return UCS_OK;
  }
  std::shared_ptr<Worker> self = worker.weak_from_this().lock();
  if (self == nullptr || worker.lent_ >= kMaxLent) {
    worker.router_->refuse();
    return UCS_OK;
  }
  ++worker.lent_;
  worker.router_->deliver(head, ReceivedData(std::move(self), bytes));
  return UCS_INPROGRESS;
}

}  // namespace kvlink::transport::ucx
