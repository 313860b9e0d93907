// What UCX says about itself. It prints to standard output by default, where kvlink's users expect JSON.
#pragma once

#include <string>
#include <vector>

namespace kvlink::transport::ucx {

/// Collects UCX's messages from now on instead of letting them be printed: a failure that matters reaches the
/// user as a typed error. Fatal ones are still printed. Does nothing where the user has set UCX_LOG_LEVEL or
/// UCX_LOG_FILE. `library` is a dlopen handle of libucp.
void collect_log(void* library) noexcept;

/// The latest messages, oldest first, at most 64. Any thread.
[[nodiscard]] std::vector<std::string> recent_log();

}  // namespace kvlink::transport::ucx
