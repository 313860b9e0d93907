// One UCX context: which transports and devices this node may use, and how.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/transport/ucx/library.hpp"

namespace kvlink::transport::ucx {

struct ContextOptions {
  /// Names and values as UCX spells them, without `UCX_`. A setting whose UCX_ variable the user has
  /// set is left alone: what the user asks for wins.
  std::vector<std::pair<std::string, std::string>> settings;
  /// Whether peers may read memory. Off, the worker has no handler for remote reads, and none for the emulated
  /// writes. UCX over TCP checks no keys, so a node with TCP lanes keeps this off. What remains there: the TCP
  /// transport itself carries out writes to any address for whoever reaches its port.
  bool one_sided{true};
};

/// Thread-safe after construction. Outlives every worker and registration made from it.
class Context {
 public:
  /// Throws Error(ucx_unavailable) when UCX refuses a setting or finds no usable device.
  Context(std::shared_ptr<const Library> library, const ContextOptions& options);

  [[nodiscard]] const Functions& call() const noexcept { return library_->call(); }
  [[nodiscard]] const Library& library() const noexcept { return *library_; }
  [[nodiscard]] ucp_context_h raw() const noexcept { return raw_.get(); }
  [[nodiscard]] bool one_sided() const noexcept { return one_sided_; }
  /// Settings that the user's environment overruled, as `UCX_NAME`.
  [[nodiscard]] const std::vector<std::string>& overruled() const noexcept { return overruled_; }
  /// What UCX prints about its memory domains, transports and devices. For people, not for parsing.
  [[nodiscard]] std::string describe() const;

 private:
  struct Cleanup {
    const Functions* call{};
    void operator()(ucp_context_h context) const noexcept { call->cleanup(context); }
  };
  std::shared_ptr<const Library> library_;
  bool one_sided_;
  std::vector<std::string> overruled_;
  std::unique_ptr<ucp_context, Cleanup> raw_;
};

}  // namespace kvlink::transport::ucx
