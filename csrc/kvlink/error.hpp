// The two ways a thing can go wrong on purpose: Error is thrown on the control path, Failure is recorded on the data
// path.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvlink {

/// Why an operation did not succeed. Each value is one leaf class of kvlink/errors.py, and
/// bindings/bind_errors.cpp is the only place that translates.
/// The numbers travel in REFUSE and INVALID messages: never renumber, only append.
enum class Code : std::uint8_t {
  invalid_argument = 1,
  out_of_memory = 2,
  ucx_unavailable = 3,
  ticket_expired = 4,
  already_claimed = 5,
  unknown_handoff = 6,
  not_offered = 7,
  layout_mismatch = 8,
  peer_unreachable = 9,
  peer_lost = 10,
  stale_peer = 11,
  deadline_exceeded = 12,
  cancelled = 13,
  busy = 14,
  lane_unavailable = 15,
  blocks_busy = 16,
  transport_failed = 17,
  protocol_error = 18,
  closed = 19,
  authentication_failed = 20,
  version_mismatch = 21,
  not_ready = 22,
  data_corrupted = 23,
};

/// Thrown by construction, registration and connecting. Never crosses a UCX callback.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] Code code() const noexcept { return code_; }

 private:
  Code code_;
};

/// The first cause of a failed transfer or handoff, kept until someone asks.
struct Failure {
  Code code{};
  std::string message;
};

}  // namespace kvlink
