// The right to read one region of a peer.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <span>

#include "kvlink/transport/ucx/endpoint.hpp"

namespace kvlink::transport::ucx {

/// Holds its endpoint. Progress thread only.
class RemoteKey {
 public:
  /// `packed` came from the peer and is taken as hostile. Throws Error(lane_unavailable) when no lane
  /// of the endpoint can use the key, or Error(protocol_error) when it cannot be a key.
  RemoteKey(std::shared_ptr<Endpoint> endpoint, std::span<const std::byte> packed);

  [[nodiscard]] ucp_rkey_h raw() const noexcept { return raw_.get(); }

 private:
  struct Destroy {
    const Functions* call{};
    void operator()(ucp_rkey_h key) const noexcept { call->rkey_destroy(key); }
  };
  std::shared_ptr<Endpoint> endpoint_;
  std::unique_ptr<ucp_rkey, Destroy> raw_;
};

}  // namespace kvlink::transport::ucx
