#include "kvlink/transport/ucx/remote_key.hpp"

#include <string>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/transport/ucx/status.hpp"
#include "kvlink/transport/ucx/untrusted_bytes.hpp"

namespace kvlink::transport::ucx {
namespace {

// A key grows with the number of memory domains; those of large RDMA hosts stay below 1 KiB.
constexpr std::size_t kMaxKeyBytes = 4096;

ucp_rkey_h unpack(const Endpoint& endpoint, std::span<const std::byte> packed) {
  const std::string operation = "unpack a remote key of " + endpoint.peer();
  if (endpoint.raw() == nullptr) throw Error(Code::peer_lost, operation + ": the endpoint is closed");
  const std::vector<std::byte> padded = padded_copy(packed, kMaxKeyBytes, operation);
  ucp_rkey_h key = nullptr;
  const ucs_status_t status = endpoint.call().ep_rkey_unpack(endpoint.raw(), padded.data(), &key);
  check(endpoint.worker().context().library(), status, operation);
  return key;
}

}  // namespace

RemoteKey::RemoteKey(std::shared_ptr<Endpoint> endpoint, std::span<const std::byte> packed)
    : endpoint_(std::move(endpoint)), raw_(unpack(*endpoint_, packed), Destroy{&endpoint_->call()}) {}

}  // namespace kvlink::transport::ucx
