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

/// Cells of a batch: enough to read the heads of a token one after the other, as they mostly lie.
constexpr std::size_t kBatchCells = 16;

using Pointers = std::array<const std::byte*, kCrcLanes>;

/// Some cells that lie alike, to be summed side by side.
struct Batch {
  CellBytes shape;
  const plan::Op* op{nullptr};
  std::size_t count{0};
  std::array<const std::byte*, kBatchCells> cells{};
  std::array<std::uint64_t, kBatchCells> numbers{};

  /// `count` cells from `first` on, `by` bytes behind their beginnings.
  [[nodiscard]] Pointers moved(std::size_t first, std::size_t lanes, std::uint64_t by) const noexcept {
    Pointers at{};
    for (std::size_t i = 0; i < lanes; ++i) at[i] = cells[first + i] + by;
    return at;
  }
};

/// Elements that lie apart: calls `feed(pointers, bytes)` with what some cells have of one token after another.
template <class Feed>
void feed_elements(const Batch& batch, std::size_t first, std::size_t lanes, Feed&& feed) noexcept {
  const CellBytes& shape = batch.shape;
  std::array<std::array<std::byte, kScratchBytes>, kCrcLanes> scratch;
  Pointers packed{};
  for (std::size_t i = 0; i < lanes; ++i) packed[i] = scratch[i].data();
  const auto step = static_cast<std::uint32_t>(kScratchBytes / shape.element_bytes);
  for (std::uint32_t token = 0; token < shape.tokens; ++token) {
    for (std::uint32_t dim = 0; dim < shape.dims; dim += step) {
      const std::uint32_t count = std::min(step, shape.dims - dim);
      const auto from = batch.moved(first, lanes, token * shape.token_stride + dim * shape.dim_stride);
      for (std::size_t i = 0; i < lanes; ++i) {
        gather_elements(from[i], shape.dim_stride, count, shape.element_bytes, scratch[i].data());
      }
      feed(packed, std::uint64_t{count} * shape.element_bytes);
    }
  }
}

/// Calls `feed(first cell, how many, pointers, bytes)` until every cell of the batch had its bytes in their order.
template <class Feed>
void feed_batch(const Batch& batch, Feed&& feed) noexcept {
  const CellBytes& shape = batch.shape;
  const auto all = [&](std::uint64_t by, std::uint64_t bytes) {
    for (std::size_t first = 0; first < batch.count; first += kCrcLanes) {
      const std::size_t lanes = std::min(kCrcLanes, batch.count - first);
      feed(first, lanes, batch.moved(first, lanes, by), bytes);
    }
  };
  const std::uint64_t row = shape.row_bytes();
  if (shape.has_whole_rows()) {
    if (shape.tokens == 1 || shape.token_stride == row) return all(0, row * shape.tokens);
    for (std::uint32_t token = 0; token < shape.tokens; ++token) all(token * shape.token_stride, row);
  } else if (shape.element_bytes > kScratchBytes) {
    for (std::uint32_t token = 0; token < shape.tokens; ++token) {
      for (std::uint32_t dim = 0; dim < shape.dims; ++dim) {
        all(token * shape.token_stride + dim * shape.dim_stride, shape.element_bytes);
      }
    }
  } else {
    for (std::size_t first = 0; first < batch.count; first += kCrcLanes) {
      const std::size_t lanes = std::min(kCrcLanes, batch.count - first);
      feed_elements(batch, first, lanes,
                    [&](const Pointers& data, std::uint64_t bytes) noexcept { feed(first, lanes, data, bytes); });
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
      if (++batch.count == kBatchCells) finish(batch);
    }
  }

  void finish(Batch& batch) const noexcept {
    if (integrity_ == Integrity::crc32c) {
      sum_crc(batch);
    } else {
      sum_xxh3(batch);
    }
    batch.count = 0;
  }

  void sum_crc(const Batch& batch) const noexcept {
    std::array<std::uint32_t, kBatchCells> crcs;
    crcs.fill(kCrcBegin);
    feed_batch(batch, [&](std::size_t first, std::size_t lanes, const Pointers& data, std::uint64_t bytes) noexcept {
      if (lanes == kCrcLanes) {
        crc32c_continue_all(std::span(crcs).subspan(first).first<kCrcLanes>(), data, bytes);
      } else {
        for (std::size_t i = 0; i < lanes; ++i) crcs[first + i] = crc32c_continue(crcs[first + i], data[i], bytes);
      }
    });
    for (std::size_t i = 0; i < batch.count; ++i) store(batch.numbers[i], ~crcs[i]);
  }

  void sum_xxh3(const Batch& batch) const noexcept {
    std::array<Xxh3, kBatchCells> hashes;
    feed_batch(batch, [&](std::size_t first, std::size_t lanes, const Pointers& data, std::uint64_t bytes) noexcept {
      for (std::size_t i = 0; i < lanes; ++i) hashes[first + i].update(data[i], bytes);
    });
    for (std::size_t i = 0; i < batch.count; ++i) store(batch.numbers[i], hashes[i].digest());
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
