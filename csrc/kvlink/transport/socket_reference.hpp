// Stage 3. What lanes over TCP are measured against: one connection that is written from, and read into, scattered
// runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvlink::transport {

/// Throws Error(invalid_argument) unless every run lies inside a pool of `pool_bytes`.
void check_runs_of_socket(std::span<const std::uint64_t> offsets, std::uint64_t run_bytes, std::size_t pool_bytes);

/// Writes every run of `pool` in order to a connected socket by writev, as many runs a call as the system takes.
///
/// The socket's own timeouts bound each call. Throws Error(deadline_exceeded) after one, and Error(peer_lost) when the
/// connection has ended.
void send_runs(int socket, std::span<const std::byte> pool, std::span<const std::uint64_t> offsets,
               std::uint64_t run_bytes);

/// Reads every run of `pool` in order from a connected socket by readv. Throws as `send_runs` does.
void receive_runs(int socket, std::span<std::byte> pool, std::span<const std::uint64_t> offsets,
                  std::uint64_t run_bytes);

}  // namespace kvlink::transport
