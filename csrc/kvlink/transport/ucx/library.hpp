// libucp.so.0, found at run time: one build of kvlink runs on a wheel's UCX and on a system's.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

namespace kvlink::transport::ucx {

/// The entry points that kvlink calls, by their UCX names without the `ucp_` prefix.
struct Functions {
  decltype(&::ucp_get_version) get_version{};
  decltype(&::ucp_get_version_string) get_version_string{};
  decltype(&::ucp_config_read) config_read{};
  decltype(&::ucp_config_modify) config_modify{};
  decltype(&::ucp_config_release) config_release{};
  decltype(&::ucp_init_version) init_version{};
  decltype(&::ucp_cleanup) cleanup{};
  decltype(&::ucp_context_print_info) context_print_info{};
  decltype(&::ucp_mem_map) mem_map{};
  decltype(&::ucp_mem_unmap) mem_unmap{};
  decltype(&::ucp_rkey_pack) rkey_pack{};
  decltype(&::ucp_rkey_buffer_release) rkey_buffer_release{};
  decltype(&::ucp_worker_create) worker_create{};
  decltype(&::ucp_worker_destroy) worker_destroy{};
  decltype(&::ucp_worker_get_address) worker_get_address{};
  decltype(&::ucp_worker_release_address) worker_release_address{};
  decltype(&::ucp_worker_get_efd) worker_get_efd{};
  decltype(&::ucp_worker_arm) worker_arm{};
  decltype(&::ucp_worker_signal) worker_signal{};
  decltype(&::ucp_worker_progress) worker_progress{};
  decltype(&::ucp_worker_set_am_recv_handler) worker_set_am_recv_handler{};
  decltype(&::ucp_am_data_release) am_data_release{};
  decltype(&::ucp_am_send_nbx) am_send_nbx{};
  decltype(&::ucp_ep_create) ep_create{};
  decltype(&::ucp_ep_close_nbx) ep_close_nbx{};
  decltype(&::ucp_ep_query) ep_query{};
  decltype(&::ucp_ep_rkey_unpack) ep_rkey_unpack{};
  decltype(&::ucp_rkey_destroy) rkey_destroy{};
  decltype(&::ucp_get_nbx) get_nbx{};
  decltype(&::ucp_request_free) request_free{};
  decltype(&::ucs_status_string) status_string{};
};

/// One loaded libucp. Never unloaded: UCX patches the process's memory functions and starts threads.
class Library {
 public:
  /// Loads `path` (a libucp.so.0; a bare name is looked up by the dynamic linker). The same file
  /// loaded twice gives the same object. Throws Error(ucx_unavailable) when there is no such
  /// file, a symbol is missing, or the version is older than the headers of this build.
  [[nodiscard]] static std::shared_ptr<const Library> load(const std::string& path);

  [[nodiscard]] const Functions& call() const noexcept { return functions_; }
  [[nodiscard]] const std::string& version() const noexcept { return version_; }
  [[nodiscard]] bool at_least(unsigned major, unsigned minor) const noexcept {
    return major_ > major || (major_ == major && minor_ >= minor);
  }
  /// The file that the dynamic linker chose.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  Library() = default;
  Functions functions_;
  unsigned major_{};
  unsigned minor_{};
  std::string version_;
  std::string path_;
};

}  // namespace kvlink::transport::ucx
