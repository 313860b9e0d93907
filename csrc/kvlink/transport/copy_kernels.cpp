#include "kvlink/transport/copy_kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvlink::transport {
namespace {

std::atomic<std::uint64_t> copied_total{0};

/// Runs of a size known at compile time become a few moves each, with no call.
template <std::size_t kBytes>
struct FixedRun {
  void operator()(std::byte* target, const std::byte* source, std::uint64_t) const noexcept {
    std::memcpy(target, source, kBytes);
  }
};

struct AnyRun {
  void operator()(std::byte* target, const std::byte* source, std::uint64_t bytes) const noexcept {
    std::memcpy(target, source, bytes);
  }
};

struct Grid {
  const std::byte* source;
  std::byte* target;
  const plan::StridedCopy& shape;
};

template <class Run>
[[gnu::always_inline]] inline void for_each_run(const Grid& grid, Run run) noexcept {
  const plan::StridedCopy shape = grid.shape;  // a copy: stores through std::byte* might alias the original
  for (std::uint64_t outer = 0; outer < shape.outer; ++outer) {
    const std::byte* source = grid.source + outer * shape.source_outer_stride;
    std::byte* target = grid.target + outer * shape.target_outer_stride;
    for (std::uint32_t inner = 0; inner < shape.inner; ++inner) {
      run(target, source, shape.run_bytes);
      source += shape.source_inner_stride;
      target += shape.target_inner_stride;
    }
  }
}

void copy_cached(const Grid& grid) noexcept {
  switch (grid.shape.run_bytes) {  // single elements where the axes are transposed, then head slices
    case 1:
      return for_each_run(grid, FixedRun<1>{});
    case 2:
      return for_each_run(grid, FixedRun<2>{});
    case 4:
      return for_each_run(grid, FixedRun<4>{});
    case 8:
      return for_each_run(grid, FixedRun<8>{});
    case 16:
      return for_each_run(grid, FixedRun<16>{});
    case 32:
      return for_each_run(grid, FixedRun<32>{});
    case 64:
      return for_each_run(grid, FixedRun<64>{});
    case 128:
      return for_each_run(grid, FixedRun<128>{});
    default:
      return for_each_run(grid, AnyRun{});
  }
}

#if defined(__x86_64__)

constexpr std::uint64_t kLine = 64;
// Below two whole lines per run the partly written lines at both ends cost more than streaming gains.
constexpr std::uint64_t kShortestStreamed = 128;

/// Whole lines to a line-aligned target, past the cache.
[[gnu::target("avx2"), gnu::always_inline]] inline void stream_lines(std::byte* target, const std::byte* source,
                                                                     std::uint64_t bytes) noexcept {
  for (std::uint64_t at = 0; at < bytes; at += kLine) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + 32), high);
  }
}

/// One run at any alignment. No line is written both ways: mixing would flush the write-combining buffer half full.
[[gnu::target("avx2")]] void stream_run(std::byte* target, const std::byte* source, std::uint64_t bytes) noexcept {
  const std::uint64_t head = (0 - reinterpret_cast<std::uintptr_t>(target)) & (kLine - 1);
  if (bytes < head + kShortestStreamed) {
    std::memcpy(target, source, bytes);
    return;
  }
  if (head != 0) std::memcpy(target, source, head);
  const std::uint64_t body = (bytes - head) & ~(kLine - 1);
  stream_lines(target + head, source + head, body);
  const std::uint64_t tail = bytes - head - body;
  if (tail != 0) std::memcpy(target + head + body, source + head + body, tail);
}

/// Head slices: short runs of whole lines, so that a run is a handful of moves with nothing to decide.
[[gnu::target("avx2")]] void stream_short_runs(const Grid& grid) noexcept {
  for (std::uint64_t outer = 0; outer < grid.shape.outer; ++outer) {
    const std::byte* source = grid.source + outer * grid.shape.source_outer_stride;
    std::byte* target = grid.target + outer * grid.shape.target_outer_stride;
    for (std::uint32_t inner = 0; inner < grid.shape.inner; ++inner) {
      stream_lines(target, source, grid.shape.run_bytes);
      source += grid.shape.source_inner_stride;
      target += grid.shape.target_inner_stride;
    }
  }
}

/// Whether every run starts on a line of the target and ends at one.
bool has_whole_lines(const Grid& grid) noexcept {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(grid.target) | grid.shape.run_bytes |
                             (grid.shape.inner > 1 ? grid.shape.target_inner_stride : 0) |
                             (grid.shape.outer > 1 ? grid.shape.target_outer_stride : 0);
  return (bits & (kLine - 1)) == 0;
}

bool streams() noexcept {
  static const bool supported = __builtin_cpu_supports("avx2") != 0;
  return supported;
}

void copy_streaming(const Grid& grid) noexcept {
  constexpr std::uint64_t kLongRun = 1024;
  if (!streams() || grid.shape.run_bytes < kShortestStreamed) {
    copy_cached(grid);
  } else if (grid.shape.run_bytes <= kLongRun && has_whole_lines(grid)) {
    stream_short_runs(grid);
  } else {
    for_each_run(grid, stream_run);
  }
}

void fence() noexcept {
  _mm_sfence();
}

#else

constexpr std::uint64_t kLine = 64;

bool streams() noexcept {
  return false;
}
void stream_run(std::byte* target, const std::byte* source, std::uint64_t bytes) noexcept {
  std::memcpy(target, source, bytes);
}
void copy_streaming(const Grid& grid) noexcept {
  copy_cached(grid);
}
void fence() noexcept {}

#endif

void copy(const Grid& grid, Stores stores) noexcept {
  if (stores == Stores::streaming) {
    copy_streaming(grid);
  } else {
    copy_cached(grid);
  }
}

/// Shorter runs are copied faster than they are fetched one by one. In longer ones the CPU finds the way by itself.
constexpr std::uint64_t kShortestFetched = 512;
constexpr std::uint64_t kLongestFetched = 32 << 10;
/// How far ahead of the copy the source is fetched, into the second level of the cache: what is on its way there does
/// not take the few places of the first. Half or twice as much does as well.
constexpr std::uint64_t kFetchedAhead = 4096;
/// Runs are fetched and copied in pieces of this much, in turns.
constexpr std::uint64_t kPiece = 512;

/// Fetches the source of one grid, a piece a step.
class Fetcher {
 public:
  Fetcher() = default;
  /// Passes over the first `skipped` bytes or a little less, as whole pieces.
  Fetcher(const std::byte* source, const plan::StridedCopy& shape, std::uint64_t skipped) noexcept : shape_(shape) {
    const std::uint64_t run = skipped / shape.run_bytes;
    at_ = (skipped - run * shape.run_bytes) / kPiece * kPiece;
    outer_ = run / shape.inner;
    inner_ = run - outer_ * shape.inner;
    row_ = source + outer_ * shape.source_outer_stride;
  }

  /// False if nothing is left.
  [[gnu::always_inline]] bool step() noexcept {
    if (outer_ >= shape_.outer) return false;
    const std::byte* run = row_ + inner_ * shape_.source_inner_stride;
    const std::uint64_t end = std::min(at_ + kPiece, shape_.run_bytes);
    for (; at_ < end; at_ += kLine) __builtin_prefetch(run + at_, 0, 2);
    if (at_ < shape_.run_bytes) return true;
    at_ = 0;
    if (++inner_ == shape_.inner) {
      inner_ = 0;
      ++outer_;
      row_ += shape_.source_outer_stride;
    }
    return true;
  }

 private:
  plan::StridedCopy shape_{.outer = 0};
  std::uint64_t outer_{0};
  std::uint64_t inner_{0};
  std::uint64_t at_{0};  // in the run
  const std::byte* row_{};
};

/// Copies `grid` piece by piece and keeps `kFetchedAhead` ahead of itself, so that at its end it has fetched as much of
/// `next`. A piece of streaming stores ends at the end of a line of the target, or of the run.
template <class Copy>
[[gnu::always_inline]] inline void for_each_piece(const Grid& grid, const Grid& next, bool in_lines,
                                                  Copy copy) noexcept {
  const plan::StridedCopy shape = grid.shape;
  const std::uint64_t pieces = (shape.run_bytes + kPiece - 1) / kPiece;
  Fetcher own(grid.source, shape, kFetchedAhead);
  Fetcher following;
  if (next.shape.run_bytes >= kShortestFetched) following = Fetcher(next.source, next.shape, 0);
  for_each_run(grid, [&](std::byte* target, const std::byte* source, std::uint64_t bytes) noexcept {
    const std::uint64_t shift = in_lines ? (0 - reinterpret_cast<std::uintptr_t>(target)) & (kLine - 1) : 0;
    std::uint64_t begin = 0;
    for (std::uint64_t piece = 1; piece <= pieces; ++piece) {
      if (!own.step()) following.step();
      const std::uint64_t end = piece == pieces ? bytes : std::min(bytes, shift + piece * kPiece);
      copy(target + begin, source + begin, end - begin);
      begin = end;
    }
  });
}

void copy_ahead(const Grid& grid, const Grid& next, Stores stores) noexcept {
  if (grid.shape.run_bytes < kShortestFetched || grid.shape.run_bytes > kLongestFetched) {
    copy(grid, stores);
  } else if (stores == Stores::streaming && streams()) {
    for_each_piece(grid, next, true, stream_run);
  } else {
    for_each_piece(grid, next, false, AnyRun{});
  }
}

}  // namespace

void copy_grid(const std::byte* source, std::byte* target, const plan::StridedCopy& grid, Stores stores) noexcept {
  if (grid.run_bytes != 0) copy({source, target, grid}, stores);
}

void CopySequence::add(const std::byte* source, std::byte* target, const plan::StridedCopy& grid) noexcept {
  const Waiting previous = std::exchange(last_, {.source = source, .target = target, .grid = grid});
  if (previous.grid.run_bytes == 0) return;
  copy_ahead({previous.source, previous.target, previous.grid}, {source, target, grid}, stores_);
}

void CopySequence::finish(std::uint64_t bytes) noexcept {
  add(nullptr, nullptr, {});
  finish_copies(bytes);
}

void finish_copies(std::uint64_t bytes) noexcept {
  fence();
  count_copied(bytes);
}

std::uint64_t copied_bytes() noexcept {
  return copied_total.load(std::memory_order_relaxed);
}

void count_copied(std::uint64_t bytes) noexcept {
  copied_total.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace kvlink::transport
