#include "kvlink/transport/ucx/endpoint.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "kvlink/transport/ucx/status.hpp"
#include "kvlink/transport/ucx/untrusted_bytes.hpp"

namespace kvlink::transport::ucx {
namespace {

// Addresses grow with the number of devices: about 100 bytes each.
constexpr std::size_t kMaxAddressBytes = 64U << 10U;
constexpr unsigned kChunkMessage = 0;
// UCX has at most 64 lanes; what does not fit is left out of the answer.
constexpr unsigned kMaxLanes = 64;

// Transports whose get reads the peer's memory without the peer's help. `self` is this process.
constexpr std::array<std::string_view, 8> kReadingTransports = {"cma",     "xpmem",   "knem", "rc_verbs",
                                                                "rc_mlx5", "dc_mlx5", "srd",  "self"};

}  // namespace

/// What UCX points at for as long as it knows the endpoint; the worker holds it while a close is pending.
struct Endpoint::State : PendingRequests {
  ucp_ep_h raw{};
  bool closing{false};
  std::atomic<ucs_status_t> error{UCS_OK};

  static void on_error(void* arg, ucp_ep_h /*endpoint*/, ucs_status_t status) noexcept {
    auto unset = UCS_OK;
    static_cast<State*>(arg)->error.compare_exchange_strong(unset, status);
  }
};

Endpoint::Endpoint(std::shared_ptr<Worker> worker, std::span<const std::byte> address, FailureMode mode,
                   std::string peer)
    : worker_(std::move(worker)), peer_(std::move(peer)), mode_(mode), state_(std::make_shared<State>()) {
  const std::string operation = "make a UCX endpoint to " + peer_;
  const std::vector<std::byte> padded = padded_copy(address, kMaxAddressBytes, operation);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(padded.data());
  params.err_mode = mode == FailureMode::peer ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
  // The callback fires in mode none too, when a transport notices the death by itself.
  params.err_handler.cb = &State::on_error;
  params.err_handler.arg = state_.get();
  check(worker_->context().library(), call().ep_create(worker_->raw(), &params, &state_->raw), operation);
}

Endpoint::~Endpoint() {
  start_close();
}

std::optional<Failure> Endpoint::failure() const {
  const ucs_status_t status = state_->error.load();
  if (status == UCS_OK) return std::nullopt;
  Failure failure = failure_of(worker_->context().library(), status, "UCX endpoint to " + peer_);
  failure.code = Code::peer_lost;
  return failure;
}

bool Endpoint::failed() const noexcept {
  return state_->error.load() != UCS_OK;
}

void Endpoint::start_close() noexcept {
  if (state_->closing) return;
  state_->closing = true;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &PendingRequests::on_complete;
  param.user_data = static_cast<PendingRequests*>(state_.get());
  if (mode_ == FailureMode::peer) {  // UCX refuses the flag in mode none
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  }
  const ucs_status_ptr_t request = call().ep_close_nbx(state_->raw, &param);
  state_->started(*worker_, request);
  // A refused close leaves UCX with a pointer to the state: it stays until the worker goes.
  if (UCS_PTR_IS_ERR(request)) state_->hold(*worker_);
}

bool Endpoint::closed() const noexcept {
  return state_->closing && state_->outstanding() == 0;
}

ucp_ep_h Endpoint::raw() const noexcept {
  return state_->closing ? nullptr : state_->raw;
}

std::vector<std::pair<std::string, std::string>> Endpoint::lanes() const {
  if (raw() == nullptr) return {};
  std::array<ucp_transport_entry_t, kMaxLanes> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = kMaxLanes;
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (call().ep_query(raw(), &attributes) != UCS_OK) return {};
  std::vector<std::pair<std::string, std::string>> lanes;
  for (unsigned index = 0; index < attributes.transports.num_entries; ++index) {
    std::pair<std::string, std::string> lane(entries[index].transport_name, entries[index].device_name);
    if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(std::move(lane));
  }
  return lanes;
}

std::string Endpoint::transports() const {
  std::string text;
  for (const auto& [transport, device] : lanes()) {
    if (!text.empty()) text += ' ';
    text.append(transport).append("/").append(device);
  }
  return text;
}

bool Endpoint::reads_remote_memory() const {
  const auto used = lanes();
  return std::any_of(used.begin(), used.end(), [](const auto& lane) {
    return std::find(kReadingTransports.begin(), kReadingTransports.end(), lane.first) != kReadingTransports.end();
  });
}

void Endpoint::start_message(PendingRequests& message, std::span<const std::byte> header,
                             std::span<const std::byte> payload) noexcept {
  if (raw() == nullptr) {
    message.started(*worker_, UCS_STATUS_PTR(UCS_ERR_CANCELED));
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &PendingRequests::on_complete;
  param.user_data = &message;
  message.started(*worker_, call().am_send_nbx(raw(), kChunkMessage, header.data(), header.size(), payload.data(),
                                               payload.size(), &param));
}

}  // namespace kvlink::transport::ucx
