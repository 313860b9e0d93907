#include "kvlink/transport/ucx/log.hpp"

#include <dlfcn.h>
#include <ucs/debug/log_def.h>

#include <array>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace kvlink::transport::ucx {
namespace {

constexpr std::size_t kLines = 64;
constexpr std::size_t kLineBytes = 256;

/// Fixed memory: UCX logs from inside its callbacks, where nothing may allocate.
struct Ring {
  std::mutex mutex;
  std::array<std::array<char, kLineBytes>, kLines> lines{};
  std::size_t written{0};
};

Ring& ring() noexcept {
  // Never destroyed: UCX's own threads may log while the process exits.
  alignas(Ring) static std::array<std::byte, sizeof(Ring)> place;
  static Ring* const forever = new (place.data()) Ring;
  return *forever;
}

ucs_log_func_rc_t on_log(const char* file, unsigned line, const char* /*function*/, ucs_log_level_t level,
                         const ucs_log_component_config_t* /*component*/, const char* message,
                         va_list arguments) noexcept {
  if (level == UCS_LOG_LEVEL_FATAL) return UCS_LOG_FUNC_RC_CONTINUE;
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_STOP;
  Ring& all = ring();
  const std::lock_guard lock(all.mutex);
  auto& text = all.lines[all.written++ % kLines];
  const char* const kind = level == UCS_LOG_LEVEL_ERROR ? "error" : "warning";
  const int prefix = std::snprintf(text.data(), text.size(), "%s: %s:%u: ", kind, file, line);
  const auto used = prefix < 0 ? 0 : static_cast<std::size_t>(prefix);
  if (used < text.size()) std::vsnprintf(text.data() + used, text.size() - used, message, arguments);
  return UCS_LOG_FUNC_RC_STOP;
}

}  // namespace

void collect_log(void* library) noexcept {
  if (std::getenv("UCX_LOG_LEVEL") != nullptr || std::getenv("UCX_LOG_FILE") != nullptr) return;
  using PushHandler = void (*)(ucs_log_func_t);
  const auto push = reinterpret_cast<PushHandler>(::dlsym(library, "ucs_log_push_handler"));
  if (push == nullptr) return;
  ring();
  push(&on_log);
}

std::vector<std::string> recent_log() {
  Ring& all = ring();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> lines;
  for (std::size_t index = all.written < kLines ? 0 : all.written - kLines; index < all.written; ++index) {
    lines.emplace_back(all.lines[index % kLines].data());
  }
  return lines;
}

}  // namespace kvlink::transport::ucx
