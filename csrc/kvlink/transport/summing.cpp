#include "kvlink/transport/summing.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kvlink/transport/crc32c.hpp"
#include "kvlink/transport/xxh3.hpp"

namespace kvlink::transport {
namespace {

constexpr std::size_t kScratchBytes = 1024;

/// How the bytes of a cell lie: `tokens` rows of `dims` elements.
struct CellBytes {
  std::uint32_t tokens{};
  std::uint32_t dims{};
  std::uint32_t element_bytes{};
  std::uint64_t token_stride{};
  std::uint64_t dim_stride{};

  [[nodiscard]] std::uint64_t row_bytes() const noexcept { return std::uint64_t{dims} * element_bytes; }
  [[nodiscard]] bool has_whole_rows() const noexcept { return dims == 1 || dim_stride == element_bytes; }
};

template <std::size_t kBytes>
void gather_fixed(const std::byte* from, std::uint64_t stride, std::uint32_t count, std::byte* out) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) std::memcpy(out + i * kBytes, from + i * stride, kBytes);
}

void gather_elements(const std::byte* from, std::uint64_t stride, std::uint32_t count, std::uint32_t bytes,
                     std::byte* out) noexcept {
  switch (bytes) {
    case 1:
      return gather_fixed<1>(from, stride, count, out);
    case 2:
      return gather_fixed<2>(from, stride, count, out);
    case 4:
      return gather_fixed<4>(from, stride, count, out);
    default:
      for (std::uint32_t i = 0; i < count; ++i) std::memcpy(out + std::size_t{i} * bytes, from + i * stride, bytes);
  }
}

/// Calls `feed(pointers, bytes)` with the bytes of some cells that lie alike, in their order, side by side.
template <std::size_t kCells, class Feed>
void feed_cells(const CellBytes& shape, const std::array<const std::byte*, kCells>& cells, Feed&& feed) noexcept {
  const auto moved = [&](std::uint64_t by) {
    auto at = cells;
    for (auto& each : at) each += by;
    return at;
  };
  const std::uint64_t row = shape.row_bytes();
  if (shape.has_whole_rows()) {
    if (shape.tokens == 1 || shape.token_stride == row) return feed(cells, row * shape.tokens);
    for (std::uint32_t token = 0; token < shape.tokens; ++token) feed(moved(token * shape.token_stride), row);
    return;
  }
  if (shape.element_bytes > kScratchBytes) {
    for (std::uint32_t token = 0; token < shape.tokens; ++token) {
      for (std::uint32_t dim = 0; dim < shape.dims; ++dim) {
        feed(moved(token * shape.token_stride + dim * shape.dim_stride), std::uint64_t{shape.element_bytes});
      }
    }
    return;
  }
  std::array<std::array<std::byte, kScratchBytes>, kCells> scratch;
  std::array<const std::byte*, kCells> packed;
  for (std::size_t i = 0; i < kCells; ++i) packed[i] = scratch[i].data();
  const auto step = static_cast<std::uint32_t>(kScratchBytes / shape.element_bytes);
  for (std::uint32_t token = 0; token < shape.tokens; ++token) {
    for (std::uint32_t dim = 0; dim < shape.dims; dim += std::min(step, shape.dims - dim)) {
      const std::uint32_t count = std::min(step, shape.dims - dim);
      const auto from = moved(token * shape.token_stride + dim * shape.dim_stride);
      for (std::size_t i = 0; i < kCells; ++i) {
        gather_elements(from[i], shape.dim_stride, count, shape.element_bytes, scratch[i].data());
      }
      feed(packed, std::uint64_t{count} * shape.element_bytes);
    }
  }
}

/// Sums the cells of one plan. Threads share it, each with rows of its own.
class CellSummer final : public SliceCopier {
 public:
  CellSummer(std::shared_ptr<const plan::SumCells> cells, Integrity integrity,
             std::shared_ptr<const LocalMemory> memory, std::shared_ptr<std::vector<std::byte>> sums)
      : cells_(std::move(cells)), integrity_(integrity), memory_(std::move(memory)), sums_(std::move(sums)) {}

  [[nodiscard]] std::uint64_t total_bytes() const noexcept override { return cells_->plan().total_bytes(); }

  [[nodiscard]] std::optional<SliceFailure> copy(StreamRange range) const noexcept override {
    Batch batch;
    cells_->visit({range.begin, range.end}, [&](const plan::SumCells::Row& row) noexcept { add_row(batch, row); });
    finish(batch);
    return std::nullopt;
  }

 private:
  /// Cells that lie alike and wait to be summed together.
  struct Batch {
    CellBytes shape;
    const plan::Op* op{nullptr};
    std::size_t count{0};
    std::array<const std::byte*, kCrcLanes> cells{};
    std::array<std::uint64_t, kCrcLanes> numbers{};
  };

  void add_row(Batch& batch, const plan::SumCells::Row& row) const noexcept {
    const plan::Op& op = *row.op;
    const plan::Side& side = cells_->side() == plan::Sides::source ? op.source : op.target;
    if (batch.op != row.op || batch.shape.tokens != row.tokens) {
      finish(batch);
      batch.op = row.op;
      batch.shape = {.tokens = row.tokens,
                     .dims = op.dims,
                     .element_bytes = op.element_bytes,
                     .token_stride = side.token_stride,
                     .dim_stride = side.dim_stride};
    }
    for (std::uint32_t head = 0; head < op.heads; ++head) {
      batch.cells[batch.count] = memory_->at(side.region, row.offset + head * side.head_stride);
      batch.numbers[batch.count] = row.first_cell + head;
      if (++batch.count == kCrcLanes) finish(batch);
    }
  }

  void finish(Batch& batch) const noexcept {
    if (integrity_ == Integrity::crc32c) {
      sum_crc(batch);
    } else {
      for (std::size_t i = 0; i < batch.count; ++i) {
        Xxh3 hash;
        feed_cells<1>(batch.shape, {batch.cells[i]},
                      [&](const auto& data, std::uint64_t bytes) noexcept { hash.update(data[0], bytes); });
        store(batch.numbers[i], hash.digest());
      }
    }
    batch.count = 0;
  }

  void sum_crc(const Batch& batch) const noexcept {
    std::array<std::uint32_t, kCrcLanes> crcs;
    crcs.fill(kCrcBegin);
    if (batch.count == kCrcLanes) {
      feed_cells<kCrcLanes>(batch.shape, batch.cells, [&](const auto& data, std::uint64_t bytes) noexcept {
        crc32c_continue_all(crcs, data, bytes);
      });
    } else {
      for (std::size_t i = 0; i < batch.count; ++i) {
        feed_cells<1>(batch.shape, {batch.cells[i]}, [&](const auto& data, std::uint64_t bytes) noexcept {
          crcs[i] = crc32c_continue(crcs[i], data[0], bytes);
        });
      }
    }
    for (std::size_t i = 0; i < batch.count; ++i) store(batch.numbers[i], ~crcs[i]);
  }

  void store(std::uint64_t cell, std::uint64_t sum) const noexcept {
    const std::uint32_t width = sum_bytes(integrity_);
    std::memcpy(sums_->data() + cell * width, &sum, width);  // little-endian, so its low bytes
  }

  std::shared_ptr<const plan::SumCells> cells_;
  const Integrity integrity_;
  std::shared_ptr<const LocalMemory> memory_;
  std::shared_ptr<std::vector<std::byte>> sums_;
};

}  // namespace

Summing::Summing(std::shared_ptr<const plan::SumCells> cells, Integrity integrity,
                 std::shared_ptr<const LocalMemory> memory, CopyThreads& threads, const Waker& waker)
    : cells_(std::move(cells)),
      integrity_(integrity),
      total_bytes_(cells_->plan().total_bytes()),
      sums_(std::make_shared<std::vector<std::byte>>(cells_->count() * sum_bytes(integrity))),
      work_(std::make_unique<CellSummer>(cells_, integrity, std::move(memory), sums_), threads, waker) {}

std::uint64_t sum_of(std::span<const std::span<const std::byte>> pieces, Integrity integrity) noexcept {
  std::uint32_t crc = kCrcBegin;
  Xxh3 hash;
  for (const auto piece : pieces) {
    if (integrity == Integrity::crc32c) crc = crc32c_continue(crc, piece.data(), piece.size());
    if (integrity == Integrity::xxh3) hash.update(piece.data(), piece.size());
  }
  return integrity == Integrity::crc32c ? std::uint64_t{~crc} : hash.digest();
}

}  // namespace kvlink::transport
