#include "kvlink/transport/ucx/library.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "kvlink/error.hpp"
#include "kvlink/transport/ucx/log.hpp"

namespace kvlink::transport::ucx {
namespace {

template <class Function>
void find(void* handle, const std::string& path, const char* name, Function& function) {
  void* const symbol = ::dlsym(handle, name);
  if (symbol == nullptr) {
    throw Error(Code::ucx_unavailable, "load " + path + ": it has no " + name + "; UCX 1.14 or newer is needed");
  }
  function = reinterpret_cast<Function>(symbol);
}

Functions find_all(void* handle, const std::string& path) {
  Functions found;
#define KVLINK_FIND(name) find(handle, path, "ucp_" #name, found.name)
  KVLINK_FIND(get_version);
  KVLINK_FIND(get_version_string);
  KVLINK_FIND(config_read);
  KVLINK_FIND(config_modify);
  KVLINK_FIND(config_release);
  KVLINK_FIND(init_version);
  KVLINK_FIND(cleanup);
  KVLINK_FIND(context_print_info);
  KVLINK_FIND(mem_map);
  KVLINK_FIND(mem_unmap);
  KVLINK_FIND(rkey_pack);
  KVLINK_FIND(rkey_buffer_release);
  KVLINK_FIND(worker_create);
  KVLINK_FIND(worker_destroy);
  KVLINK_FIND(worker_get_address);
  KVLINK_FIND(worker_release_address);
  KVLINK_FIND(worker_get_efd);
  KVLINK_FIND(worker_arm);
  KVLINK_FIND(worker_signal);
  KVLINK_FIND(worker_progress);
  KVLINK_FIND(worker_set_am_recv_handler);
  KVLINK_FIND(am_data_release);
  KVLINK_FIND(am_send_nbx);
  KVLINK_FIND(ep_create);
  KVLINK_FIND(ep_close_nbx);
  KVLINK_FIND(ep_query);
  KVLINK_FIND(ep_rkey_unpack);
  KVLINK_FIND(rkey_destroy);
  KVLINK_FIND(get_nbx);
  KVLINK_FIND(request_free);
#undef KVLINK_FIND
  find(handle, path, "ucs_status_string", found.status_string);  // from libucs, which libucp brings
  return found;
}

/// Keeps UCX from patching mmap, munmap and their like while it loads. From 1.16 on its constructor rewrites the code
/// of some twenty libc functions, in a process that has other threads; 1.22 takes 0.4 s for it. A registration cache
/// (RDMA hosts) still installs the hooks when it is made, as older versions did. A user who sets the UCX_MEM_
/// variables decides alone.
void leave_libc_unpatched(const std::string& libucp_path) {
  if (std::getenv("UCX_MEM_EVENTS") != nullptr || std::getenv("UCX_MEM_MMAP_HOOK_MODE") != nullptr) return;
  const std::string folder = libucp_path.substr(0, libucp_path.rfind('/') + 1);  // empty for a bare name
  void* const libucm = ::dlopen((folder + "libucm.so.0").c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (libucm == nullptr) return;
  struct Options {  // the start of ucm_global_config_t, the same since UCX 1.0
    int log_level;
    int enable_events;
  };
  auto* const options = static_cast<Options*>(::dlsym(libucm, "ucm_global_opts"));
  void* const initialise = ::dlsym(libucm, "ucm_library_init");
  if (options == nullptr || initialise == nullptr || options->enable_events != 1) return;
  options->enable_events = 0;
  reinterpret_cast<void (*)()>(initialise)();  // runs once a process: the constructor's own call finds it done
  options->enable_events = 1;
}

std::string file_of(void* symbol, const std::string& otherwise) {
  Dl_info info{};
  if (::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return otherwise;
  return info.dli_fname;
}

}  // namespace

std::shared_ptr<const Library> Library::load(const std::string& path) {
  static std::mutex mutex;
  static std::map<void*, std::shared_ptr<const Library>> loaded;  // by dlopen handle
  leave_libc_unpatched(path);
  // RTLD_LOCAL: another UCX in the process must not see these symbols, nor we its.
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const cause = ::dlerror();
    throw Error(Code::ucx_unavailable,
                "load " + path + ": " + (cause != nullptr ? cause : "unknown cause") +
                    "; install libucx-cu12 or libucx-cu13, or UCX 1.14 or newer, or set KVLINK_UCX");
  }
  const std::lock_guard lock(mutex);
  if (const auto known = loaded.find(handle); known != loaded.end()) return known->second;

  auto library = std::shared_ptr<Library>(new Library);
  library->functions_ = find_all(handle, path);
  library->version_ = library->functions_.get_version_string();
  library->path_ = file_of(reinterpret_cast<void*>(library->functions_.get_version), path);
  unsigned release = 0;
  library->functions_.get_version(&library->major_, &library->minor_, &release);
  if (library->major_ != UCP_API_MAJOR || library->minor_ < UCP_API_MINOR) {
    throw Error(Code::ucx_unavailable,
                "UCX " + library->version_ + " at " + library->path_ +
                    " cannot be used: " + std::to_string(UCP_API_MAJOR) + "." + std::to_string(UCP_API_MINOR) +
                    " or newer is needed; install libucx-cu12 or libucx-cu13, or set KVLINK_UCX");
  }
  collect_log(handle);
  loaded.emplace(handle, library);
  return library;
}

}  // namespace kvlink::transport::ucx
