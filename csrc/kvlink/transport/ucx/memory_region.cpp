#include "kvlink/transport/ucx/memory_region.hpp"

#include <string>

#include "kvlink/error.hpp"
#include "kvlink/transport/ucx/status.hpp"

namespace kvlink::transport::ucx {
namespace {

ucp_mem_h map(const Context& context, const LocalRegion& region) {
  if (!context.one_sided()) {
    throw Error(Code::invalid_argument, "register memory: this UCX context offers no one-sided access");
  }
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = region.base;
  params.length = region.bytes;
  ucp_mem_h mapping = nullptr;
  check(context.library(), context.call().mem_map(context.raw(), &params, &mapping),
        "register " + std::to_string(region.bytes) + " bytes");
  return mapping;
}

std::vector<std::byte> pack(const Context& context, ucp_mem_h mapping) {
  void* key = nullptr;
  std::size_t bytes = 0;
  check(context.library(), context.call().rkey_pack(context.raw(), mapping, &key, &bytes), "pack a remote key");
  const std::unique_ptr<void, decltype(&::ucp_rkey_buffer_release)> owned(key, context.call().rkey_buffer_release);
  const auto* const begin = static_cast<const std::byte*>(key);
  return {begin, begin + bytes};
}

}  // namespace

MemoryRegion::MemoryRegion(std::shared_ptr<Context> context, const LocalRegion& region)
    : region_(region),
      context_(std::move(context)),
      mapping_(map(*context_, region), Unmap{context_.get()}),
      packed_key_(pack(*context_, mapping_.get())) {}

void MemoryRegion::Unmap::operator()(ucp_mem_h mapping) const noexcept {
  // UCX logs the cause itself; the process's memory is released by its owner either way.
  [[maybe_unused]] const ucs_status_t status = context->call().mem_unmap(context->raw(), mapping);
}

}  // namespace kvlink::transport::ucx
