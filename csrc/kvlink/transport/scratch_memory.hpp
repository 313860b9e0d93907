// Where the elements of one part wait to be converted.
#pragma once

#include <cstdint>
#include <memory>

#include "kvlink/transport/copy_threads.hpp"
#include "kvlink/transport/local_memory.hpp"

namespace kvlink::transport {

/// The regions of a node, and as one more behind them memory of the part's own, which is all zero.
///
/// It has addresses for as many blocks as the target has, and takes memory only for those that are written. Whatever
/// may still write it holds this object.
class ScratchMemory final : public LocalMemory {
 public:
  /// `dense_bytes`: so many will be written, one behind the other but for a few gaps; 0: here and there. Throws
  /// Error(out_of_memory) when the system has no such range of addresses.
  ScratchMemory(const LocalMemory& own, std::uint64_t bytes, std::uint64_t dense_bytes);
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  ~ScratchMemory();

  /// Has a copy thread give back what was written, since that takes long. Only once nothing reads or writes it.
  static void give_back(std::shared_ptr<const ScratchMemory> scratch, CopyThreads& threads) noexcept;

 private:
  void discard() const noexcept;
};

}  // namespace kvlink::transport
