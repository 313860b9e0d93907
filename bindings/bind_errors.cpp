// From the native core's codes to the exceptions of kvlink/errors.py: the only translation point.
#include <nanobind/nanobind.h>

#include <array>
#include <cstring>
#include <exception>

#include "bindings.hpp"
#include "kvlink/error.hpp"

namespace nb = nanobind;
using kvlink::Code;

const char* class_name_of(Code code) noexcept {
  switch (code) {  // No default: a new Code must not compile until it is named here.
    case Code::invalid_argument:
      return "InvalidArgument";
    case Code::out_of_memory:
      return "OutOfMemory";
    case Code::ucx_unavailable:
      return "UcxUnavailable";
    case Code::ticket_expired:
      return "TicketExpired";
    case Code::already_claimed:
      return "AlreadyClaimed";
    case Code::unknown_handoff:
      return "UnknownHandoff";
    case Code::not_offered:
      return "NotOffered";
    case Code::layout_mismatch:
      return "LayoutMismatch";
    case Code::peer_unreachable:
      return "PeerUnreachable";
    case Code::peer_lost:
      return "PeerLost";
    case Code::stale_peer:
      return "StalePeer";
    case Code::deadline_exceeded:
      return "DeadlineExceeded";
    case Code::cancelled:
      return "Cancelled";
    case Code::busy:
      return "Busy";
    case Code::lane_unavailable:
      return "LaneUnavailable";
    case Code::blocks_busy:
      return "BlocksBusy";
    case Code::transport_failed:
      return "TransportFailed";
    case Code::protocol_error:
      return "ProtocolError";
    case Code::closed:
      return "Closed";
    case Code::authentication_failed:
      return "AuthenticationFailed";
    case Code::version_mismatch:
      return "VersionMismatch";
    case Code::not_ready:
      return "NotReady";
    case Code::data_corrupted:
      return "DataCorrupted";
  }
  return "KvlinkError";
}

Code code_of_class_name(const char* name) {
  constexpr auto last = static_cast<unsigned>(Code::data_corrupted);
  for (unsigned number = 1; number <= last; ++number) {
    const auto code = static_cast<Code>(number);
    if (std::strcmp(class_name_of(code), name) == 0) return code;
  }
  throw kvlink::Error(Code::invalid_argument, std::string("no error class is called ") + name);
}

void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& caught, void*) {
    try {
      std::rethrow_exception(caught);
    } catch (const kvlink::Error& error) {
      const nb::object cls = nb::module_::import_("kvlink.errors").attr(class_name_of(error.code()));
      PyErr_SetString(cls.ptr(), error.what());
    }
  });
}
