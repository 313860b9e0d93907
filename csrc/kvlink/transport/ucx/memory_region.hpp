// Memory of this process that peers may read with one-sided operations.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kvlink/transport/transfer.hpp"
#include "kvlink/transport/ucx/context.hpp"

namespace kvlink::transport::ucx {

/// One registration and its packed key. Borrows the memory: whoever owns it destroys this first.
class MemoryRegion {
 public:
  /// Throws Error(transport_failed) when UCX cannot register the range, or Error(invalid_argument)
  /// when the context offers no one-sided access.
  MemoryRegion(std::shared_ptr<Context> context, const LocalRegion& region);

  /// The key that a peer unpacks. It gives access to nothing but this region where the transport checks keys.
  [[nodiscard]] std::span<const std::byte> packed_key() const noexcept { return packed_key_; }
  [[nodiscard]] const LocalRegion& memory() const noexcept { return region_; }

 private:
  struct Unmap {
    Context* context{};
    void operator()(ucp_mem_h mapping) const noexcept;
  };
  LocalRegion region_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<ucp_mem, Unmap> mapping_;
  std::vector<std::byte> packed_key_;
};

}  // namespace kvlink::transport::ucx
