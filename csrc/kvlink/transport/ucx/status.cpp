#include "kvlink/transport/ucx/status.hpp"

#include <string>

#include "kvlink/transport/ucx/library.hpp"

namespace kvlink::transport::ucx {

Code code_of(ucs_status_t status) noexcept {
  if (UCS_IS_LINK_ERROR(status) || UCS_IS_ENDPOINT_ERROR(status)) return Code::peer_lost;
  switch (static_cast<int>(status)) {
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_CANCELED:
      return Code::peer_lost;
    case UCS_ERR_NO_MEMORY:
      return Code::out_of_memory;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
    case UCS_ERR_NO_DEVICE:
      return Code::lane_unavailable;
    default:
      return Code::transport_failed;
  }
}

Failure failure_of(const Library& library, ucs_status_t status, std::string_view operation) {
  return {.code = code_of(status),
          .message = std::string(operation) + ": UCX says: " + library.call().status_string(status)};
}

void check(const Library& library, ucs_status_t status, std::string_view operation) {
  if (status == UCS_OK) return;
  const Failure failure = failure_of(library, status, operation);
  throw Error(failure.code, failure.message);
}

}  // namespace kvlink::transport::ucx
