#include "kvlink/transport/ucx/context.hpp"

#include <cstdio>
#include <cstdlib>

#include "kvlink/error.hpp"
#include "kvlink/transport/ucx/status.hpp"

namespace kvlink::transport::ucx {
namespace {

using Config = std::unique_ptr<ucp_config_t, decltype(&::ucp_config_release)>;

/// What a setting is called in this version of UCX.
std::string name_in(const Library& library, const std::string& name) {
  // Up to 1.16 the settings of one transport are matched without its name.
  if (!library.at_least(1, 17) && name.starts_with("TCP_")) return name.substr(4);
  return name;
}

Config read_config(const Library& library, const ContextOptions& options) {
  ucp_config_t* raw = nullptr;
  check(library, library.call().config_read(nullptr, nullptr, &raw), "read the UCX configuration");
  Config config(raw, library.call().config_release);
  // The older protocols emulate every get over CMA by messages; from 1.16 the newer ones are the default.
  if (!library.at_least(1, 16) && std::getenv("UCX_PROTO_ENABLE") == nullptr) {
    check(library, library.call().config_modify(raw, "PROTO_ENABLE", "y"), "choose UCX's newer protocols");
  }
  for (const auto& [name, value] : options.settings) {
    if (std::getenv(("UCX_" + name).c_str()) != nullptr) continue;
    const ucs_status_t status = library.call().config_modify(raw, name_in(library, name).c_str(), value.c_str());
    if (status != UCS_OK) {
      std::string what = "UCX " + library.version() + " refused ";
      what.append(name).append("=").append(value).append(": ").append(library.call().status_string(status));
      throw Error(Code::ucx_unavailable, what);
    }
  }
  return config;
}

ucp_context_h init(const Library& library, const ContextOptions& options) {
  const Config config = read_config(library, options);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (options.one_sided) params.features |= UCP_FEATURE_RMA;
  params.name = "kvlink";
  ucp_context_h context = nullptr;
  const ucs_status_t status =
      library.call().init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config.get(), &context);
  if (status != UCS_OK) {
    throw Error(Code::ucx_unavailable, "start UCX " + library.version() + " from " + library.path() + ": " +
                                           library.call().status_string(status) + "; check the UCX_ settings");
  }
  return context;
}

std::vector<std::string> settings_of_user(const ContextOptions& options) {
  std::vector<std::string> names;
  for (const auto& [name, value] : options.settings) {
    if (std::getenv(("UCX_" + name).c_str()) != nullptr) names.push_back("UCX_" + name);
  }
  return names;
}

}  // namespace

Context::Context(std::shared_ptr<const Library> library, const ContextOptions& options)
    : library_(std::move(library)),
      one_sided_(options.one_sided),
      overruled_(settings_of_user(options)),
      raw_(init(*library_, options), Cleanup{&library_->call()}) {}

std::string Context::describe() const {
  char* text = nullptr;
  std::size_t length = 0;
  std::FILE* const stream = ::open_memstream(&text, &length);
  if (stream == nullptr) throw Error(Code::out_of_memory, "describe the UCX context");
  call().context_print_info(raw(), stream);
  std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owned(text, &std::free);
  return {owned.get(), length};
}

}  // namespace kvlink::transport::ucx
