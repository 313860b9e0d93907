// The get lane: one-sided reads of the source's memory, in which the source's CPU has no part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvlink/transport/transfer.hpp"
#include "kvlink/transport/ucx/endpoint.hpp"
#include "kvlink/transport/ucx/remote_key.hpp"

namespace kvlink::plan {
class Plan;
}

namespace kvlink::transport {

class LocalMemory;

/// What the peer said about one of its regions.
struct RemoteRegion {
  std::uint64_t address{};
  std::uint64_t bytes{};
  std::span<const std::byte> packed_key;
};

/// Where one peer's regions can be read; one per peer, shared by its transfers.
struct GetSource {
  std::shared_ptr<ucx::Endpoint> endpoint;
  std::vector<std::shared_ptr<ucx::RemoteKey>> keys;
  std::vector<std::uint64_t> region_addresses;
  std::vector<std::uint64_t> region_bytes;
};

/// Unpacks the keys of all regions. Throws Error(lane_unavailable) when a key cannot be used over this
/// endpoint or UCX would emulate the reads, or Error(protocol_error) for what cannot be a region.
[[nodiscard]] std::shared_ptr<const GetSource> make_get_source(std::shared_ptr<ucx::Endpoint> endpoint,
                                                               std::span<const RemoteRegion> regions);

struct GetLimits {
  /// Operations and bytes in flight at once, per transfer.
  std::uint32_t window_ops{256};
  std::uint64_t window_bytes{8U << 20U};
  /// Operations started in one turn of the loop, at most; a turn also ends after `turn_ns`.
  std::uint32_t ops_per_turn{64};
  std::uint64_t turn_ns{200'000};
};

/// The plan's target regions are those of `target`, its source regions those of `source`.
[[nodiscard]] std::shared_ptr<Transfer> make_get_transfer(std::shared_ptr<const plan::Plan> plan,
                                                          std::shared_ptr<const GetSource> source,
                                                          std::shared_ptr<const LocalMemory> target,
                                                          const GetLimits& limits);

}  // namespace kvlink::transport
