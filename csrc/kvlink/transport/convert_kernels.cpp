#include "kvlink/transport/convert_kernels.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvlink::transport {
namespace {

using plan::Dtype;
using plan::DtypePair;

constexpr std::uint32_t kInfinity = 0x7f80'0000;  // of float32; whatever is above it is a NaN
constexpr std::uint32_t kMagnitude = 0x7fff'ffff;

/// Every element passes through the bits of a float32, which holds each value of the others exactly.
[[nodiscard]] std::uint32_t from_float16(std::uint16_t half) noexcept {
  const auto sign = static_cast<std::uint32_t>(half & 0x8000U) << 16U;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude > 0x7c00) return sign | 0x7fc0'0000U | ((magnitude & 0x3ffU) << 13U);
  if (magnitude == 0x7c00) return sign | kInfinity;
  if (magnitude >= 0x0400) return sign | ((magnitude << 13U) + ((127U - 15U) << 23U));
  // A subnormal one counts steps of 2^-24.
  return sign | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
}

[[nodiscard]] std::uint16_t to_float16(std::uint32_t bits) noexcept {
  const auto sign = static_cast<std::uint16_t>((bits >> 16U) & 0x8000U);
  const std::uint32_t magnitude = bits & kMagnitude;
  std::uint32_t half = 0;
  if (magnitude > kInfinity) {
    half = 0x7e00U | ((magnitude >> 13U) & 0x3ffU);
  } else if (magnitude >= 0x4780'0000) {  // 65536 and more; rounding takes what is just below to infinity, too
    half = 0x7c00;
  } else if (magnitude >= 0x3880'0000) {  // 2^-14: the smallest that is normal
    const std::uint32_t rebased = magnitude - ((127U - 15U) << 23U);
    half = (rebased + 0xfffU + ((rebased >> 13U) & 1U)) >> 13U;
  } else {
    // Added to 0.5, whose last bit counts 2^-24, the sum is rounded to steps of that by the addition.
    const float steps = std::bit_cast<float>(magnitude) + 0.5F;
    half = std::bit_cast<std::uint32_t>(steps) - std::bit_cast<std::uint32_t>(0.5F);
  }
  return static_cast<std::uint16_t>(sign | half);
}

[[nodiscard]] std::uint16_t to_bfloat16(std::uint32_t bits) noexcept {
  if ((bits & kMagnitude) > kInfinity) return static_cast<std::uint16_t>((bits >> 16U) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U);
}

template <Dtype kDtype>
[[nodiscard]] std::uint32_t load(const std::byte* from) noexcept {
  if constexpr (kDtype == Dtype::float32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  } else {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    return kDtype == Dtype::float16 ? from_float16(bits) : static_cast<std::uint32_t>(bits) << 16U;
  }
}

template <Dtype kDtype>
void store(std::byte* to, std::uint32_t bits) noexcept {
  if constexpr (kDtype == Dtype::float32) {
    std::memcpy(to, &bits, sizeof bits);
  } else {
    const std::uint16_t narrow = kDtype == Dtype::float16 ? to_float16(bits) : to_bfloat16(bits);
    std::memcpy(to, &narrow, sizeof narrow);
  }
}

struct Elements {
  const std::byte* source;
  std::byte* target;
  std::uint64_t count;
};

template <Dtype kFrom, Dtype kTo>
void convert_each(const Elements& all, std::uint64_t first) noexcept {
  for (std::uint64_t i = first; i < all.count; ++i) {
    store<kTo>(all.target + i * plan::dtype_bytes(kTo), load<kFrom>(all.source + i * plan::dtype_bytes(kFrom)));
  }
}

#if defined(__x86_64__)

constexpr std::uint64_t kAtOnce = 8;

template <Dtype kDtype>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i load_eight(const std::byte* from) noexcept {
  if constexpr (kDtype == Dtype::float32) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  } else {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (kDtype == Dtype::float16) return _mm256_castps_si256(_mm256_cvtph_ps(narrow));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
  }
}

/// As `to_bfloat16`, in the lower half of each of eight.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i round_to_bfloat16(__m256i bits) noexcept {
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(kMagnitude))),
                                         _mm256_set1_epi32(static_cast<int>(kInfinity)));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
}

template <Dtype kDtype>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void store_eight(std::byte* to, __m256i bits) noexcept {
  if constexpr (kDtype == Dtype::float32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  } else {
    __m128i narrow;
    if constexpr (kDtype == Dtype::float16) {
      narrow = _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i halves = round_to_bfloat16(bits);
      narrow = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow);
  }
}

template <Dtype kFrom, Dtype kTo>
[[gnu::target("avx2,f16c")]] std::uint64_t convert_eights(const Elements& all) noexcept {
  std::uint64_t i = 0;
  for (; i + kAtOnce <= all.count; i += kAtOnce) {
    store_eight<kTo>(all.target + i * plan::dtype_bytes(kTo),
                     load_eight<kFrom>(all.source + i * plan::dtype_bytes(kFrom)));
  }
  return i;
}

/// Not every compiler's `__builtin_cpu_supports` knows this one.
[[nodiscard]] bool has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

[[nodiscard]] bool has_eights() noexcept {
  static const bool supported = __builtin_cpu_supports("avx2") != 0 && has_f16c();
  return supported;
}

#else

constexpr std::uint64_t kAtOnce = 1;

template <Dtype kFrom, Dtype kTo>
std::uint64_t convert_eights(const Elements&) noexcept {
  return 0;
}
[[nodiscard]] constexpr bool has_eights() noexcept {
  return false;
}

#endif

/// How far to go by what the CPU has for it.
enum class Way : std::uint8_t { best, plain };

template <Dtype kFrom, Dtype kTo>
void convert_all(const Elements& all, Way way) noexcept {
  const bool eights = way == Way::best && all.count >= kAtOnce && has_eights();
  convert_each<kFrom, kTo>(all, eights ? convert_eights<kFrom, kTo>(all) : 0);
}

template <Dtype kFrom>
void convert_from(const Elements& all, Dtype to, Way way) noexcept {
  switch (to) {
    case Dtype::float32:
      return convert_all<kFrom, Dtype::float32>(all, way);
    case Dtype::float16:
      return convert_all<kFrom, Dtype::float16>(all, way);
    case Dtype::bfloat16:
      return convert_all<kFrom, Dtype::bfloat16>(all, way);
  }
}

void convert(const Elements& all, DtypePair pair, Way way) noexcept {
  switch (pair.from) {
    case Dtype::float32:
      return convert_from<Dtype::float32>(all, pair.to, way);
    case Dtype::float16:
      return convert_from<Dtype::float16>(all, pair.to, way);
    case Dtype::bfloat16:
      return convert_from<Dtype::bfloat16>(all, pair.to, way);
  }
}

}  // namespace

void convert_elements(const std::byte* source, std::byte* target, std::uint64_t count, DtypePair pair) noexcept {
  convert({source, target, count}, pair, Way::best);
}

void convert_elements_plainly(const std::byte* source, std::byte* target, std::uint64_t count,
                              DtypePair pair) noexcept {
  convert({source, target, count}, pair, Way::plain);
}

}  // namespace kvlink::transport
