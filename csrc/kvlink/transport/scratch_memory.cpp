#include "kvlink/transport/scratch_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/error.hpp"

namespace kvlink::transport {
namespace {

/// From here on large pages pay: they are cleared and given back several times as fast, and the last one of a group may
/// be cleared for nothing.
constexpr std::uint64_t kLargePagesBytes = std::uint64_t{8} << 20U;

std::vector<LocalRegion> with_scratch(const LocalMemory& own, std::uint64_t bytes, std::uint64_t dense_bytes) {
  std::vector<LocalRegion> regions = own.regions();
  regions.reserve(regions.size() + 1);
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    throw Error(Code::out_of_memory,
                "no " + std::to_string(bytes) +
                    " bytes of address space in which elements wait to be converted: " + std::strerror(errno));
  }
  (void)::madvise(base, bytes, dense_bytes >= kLargePagesBytes ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  regions.push_back({.base = static_cast<std::byte*>(base), .bytes = bytes});
  return regions;
}

}  // namespace

ScratchMemory::ScratchMemory(const LocalMemory& own, std::uint64_t bytes, std::uint64_t dense_bytes)
    : LocalMemory(with_scratch(own, bytes, dense_bytes)) {}

ScratchMemory::~ScratchMemory() {
  ::munmap(regions().back().base, regions().back().bytes);
}

void ScratchMemory::discard() const noexcept {
  (void)::madvise(regions().back().base, regions().back().bytes, MADV_DONTNEED);
}

void ScratchMemory::give_back(std::shared_ptr<const ScratchMemory> scratch, CopyThreads& threads) noexcept {
  try {
    // A queue that is full: it goes with the last who holds it, and takes as long there.
    (void)threads.submit_once([scratch = std::move(scratch)] { scratch->discard(); });
  } catch (const std::bad_alloc&) {  // likewise
  }
}

}  // namespace kvlink::transport
