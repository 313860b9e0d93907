// Checksums of the blocks of one side of a handoff, made by the copy threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvlink/plan/sum_cells.hpp"
#include "kvlink/transport/integrity.hpp"
#include "kvlink/transport/local_memory.hpp"
#include "kvlink/transport/sliced_transfer.hpp"

namespace kvlink::transport {

/// One checksum a cell, in the order of the cells. Used like a Transfer, by the progress thread, though it only reads;
/// what is small is summed by `start` itself.
class Summing {
 public:
  /// `threads` and `waker` outlive it. `memory` has the regions of the cells' side.
  Summing(std::shared_ptr<const plan::SumCells> cells, Integrity integrity, std::shared_ptr<const LocalMemory> memory,
          CopyThreads& threads, const Waker& waker);

  void start() noexcept { work_.start(); }
  bool advance() noexcept { return work_.advance(); }
  void cancel() noexcept { work_.cancel(); }
  /// No thread reads blocks for it any more.
  [[nodiscard]] bool drained() const noexcept { return work_.drained(); }
  [[nodiscard]] bool complete() const noexcept { return drained() && work_.moved_bytes() == total_bytes_; }

  /// Little-endian, `sum_bytes` each. Meaningful once complete.
  [[nodiscard]] std::span<const std::byte> sums() const noexcept { return *sums_; }
  [[nodiscard]] const plan::SumCells& cells() const noexcept { return *cells_; }
  [[nodiscard]] Integrity integrity() const noexcept { return integrity_; }

 private:
  std::shared_ptr<const plan::SumCells> cells_;
  const Integrity integrity_;
  const std::uint64_t total_bytes_;
  std::shared_ptr<std::vector<std::byte>> sums_;
  SlicedTransfer work_;
};

/// The sum of some pieces, as if they were one: what `Summing` does to a cell.
[[nodiscard]] std::uint64_t sum_of(std::span<const std::span<const std::byte>> pieces, Integrity integrity) noexcept;

}  // namespace kvlink::transport
