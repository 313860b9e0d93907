#include "kvlink/transport/xxh3.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvlink::transport {
namespace {

using Sums = std::array<std::uint64_t, Xxh3::kLanes>;

constexpr std::uint64_t kPrime32_1 = 0x9e3779b1U;
constexpr std::uint64_t kPrime32_2 = 0x85ebca77U;
constexpr std::uint64_t kPrime32_3 = 0xc2b2ae3dU;
constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87U;
constexpr std::uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4fU;
constexpr std::uint64_t kPrime64_3 = 0x165667b19e3779f9U;
constexpr std::uint64_t kPrime64_4 = 0x85ebca77c2b2ae63U;
constexpr std::uint64_t kPrime64_5 = 0x27d4eb2f165667c5U;

constexpr std::size_t kShortBytes = 240;  // up to here a hash has no stripes
constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kBlockStripes = (kSecretBytes - Xxh3::kStripeBytes) / 8;

constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static_assert(std::endian::native == std::endian::little, "XXH3 is over little-endian words");

template <class Byte>
[[nodiscard]] std::uint64_t read64(const Byte* from) noexcept {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
template <class Byte>
[[nodiscard]] std::uint32_t read32(const Byte* from) noexcept {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

[[nodiscard]] std::uint64_t fold_product(std::uint64_t left, std::uint64_t right) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(left) * right;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64U);
}

[[nodiscard]] std::uint64_t avalanche(std::uint64_t hash) noexcept {
  hash = (hash ^ (hash >> 37U)) * 0x165667919e3779f9U;
  return hash ^ (hash >> 32U);
}
[[nodiscard]] std::uint64_t avalanche_64(std::uint64_t hash) noexcept {
  hash = (hash ^ (hash >> 33U)) * kPrime64_2;
  hash = (hash ^ (hash >> 29U)) * kPrime64_3;
  return hash ^ (hash >> 32U);
}

[[nodiscard]] std::uint64_t mix_16(const std::byte* data, std::size_t secret) noexcept {
  return fold_product(read64(data) ^ read64(kSecret + secret), read64(data + 8) ^ read64(kSecret + secret + 8));
}

[[nodiscard]] std::uint64_t hash_up_to_16(const std::byte* data, std::size_t bytes) noexcept {
  if (bytes > 8) {
    const std::uint64_t low = read64(data) ^ read64(kSecret + 24) ^ read64(kSecret + 32);
    const std::uint64_t high = read64(data + bytes - 8) ^ read64(kSecret + 40) ^ read64(kSecret + 48);
    return avalanche(bytes + __builtin_bswap64(low) + high + fold_product(low, high));
  }
  if (bytes >= 4) {
    std::uint64_t hash = read32(data + bytes - 4) + (std::uint64_t{read32(data)} << 32U);
    hash ^= read64(kSecret + 8) ^ read64(kSecret + 16);
    hash ^= std::rotl(hash, 49) ^ std::rotl(hash, 24);
    hash *= 0x9fb21c651e98df25U;
    hash ^= (hash >> 35U) + bytes;
    hash *= 0x9fb21c651e98df25U;
    return hash ^ (hash >> 28U);
  }
  if (bytes == 0) return avalanche_64(read64(kSecret + 56) ^ read64(kSecret + 64));
  const auto at = [&](std::size_t index) { return static_cast<std::uint32_t>(data[index]); };
  const std::uint32_t all =
      (at(0) << 16U) | (at(bytes >> 1U) << 24U) | at(bytes - 1) | (static_cast<std::uint32_t>(bytes) << 8U);
  return avalanche_64(std::uint64_t{all} ^ (read32(kSecret) ^ read32(kSecret + 4)));
}

[[nodiscard]] std::uint64_t hash_up_to_128(const std::byte* data, std::size_t bytes) noexcept {
  std::uint64_t sum = bytes * kPrime64_1;
  for (std::size_t i = (bytes - 1) / 32 + 1; i-- != 0;) {
    sum += mix_16(data + 16 * i, 32 * i) + mix_16(data + bytes - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(sum);
}

[[nodiscard]] std::uint64_t hash_up_to_240(const std::byte* data, std::size_t bytes) noexcept {
  std::uint64_t sum = bytes * kPrime64_1;
  for (std::size_t i = 0; i < 8; ++i) sum += mix_16(data + 16 * i, 16 * i);
  sum = avalanche(sum);
  for (std::size_t i = 8; i < bytes / 16; ++i) sum += mix_16(data + 16 * i, 16 * (i - 8) + 3);
  return avalanche(sum + mix_16(data + bytes - 16, 136 - 17));
}

[[nodiscard]] std::uint64_t hash_short(const std::byte* data, std::size_t bytes) noexcept {
  if (bytes <= 16) return hash_up_to_16(data, bytes);
  return bytes <= 128 ? hash_up_to_128(data, bytes) : hash_up_to_240(data, bytes);
}

void add_stripe(Sums& sums, const std::byte* data, std::size_t secret) noexcept {
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::uint64_t word = read64(data + 8 * i);
    const std::uint64_t keyed = word ^ read64(kSecret + secret + 8 * i);
    sums[i ^ 1U] += word;
    sums[i] += (keyed & 0xffffffffU) * (keyed >> 32U);
  }
}

void add_stripes_plainly(Sums& sums, const std::byte* data, std::size_t stripes, std::size_t secret) noexcept {
  for (std::size_t i = 0; i < stripes; ++i) add_stripe(sums, data + i * Xxh3::kStripeBytes, secret + 8 * i);
}

#if defined(__x86_64__)

[[gnu::target("avx2"), gnu::always_inline]] inline __m256i add_half(__m256i sums, const std::byte* data,
                                                                    const unsigned char* secret) noexcept {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  const __m256i keyed = _mm256_xor_si256(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(product, _mm256_add_epi64(sums, swapped));
}

[[gnu::target("avx2")]] void add_stripes_by_avx2(Sums& sums, const std::byte* data, std::size_t stripes,
                                                 std::size_t secret) noexcept {
  auto* const place = reinterpret_cast<__m256i*>(sums.data());
  __m256i low = _mm256_load_si256(place);
  __m256i high = _mm256_load_si256(place + 1);
  for (std::size_t i = 0; i < stripes; ++i) {
    low = add_half(low, data + i * Xxh3::kStripeBytes, kSecret + secret + 8 * i);
    high = add_half(high, data + i * Xxh3::kStripeBytes + 32, kSecret + secret + 8 * i + 32);
  }
  _mm256_store_si256(place, low);
  _mm256_store_si256(place + 1, high);
}

[[nodiscard]] bool has_avx2() noexcept {
  static const bool supported = __builtin_cpu_supports("avx2") != 0;
  return supported;
}

#endif

/// `stripes` of one block. `sums` lie on a multiple of 64 bytes.
void add_stripes(Sums& sums, const std::byte* data, std::size_t stripes, std::size_t secret) noexcept {
#if defined(__x86_64__)
  if (has_avx2()) return add_stripes_by_avx2(sums, data, stripes, secret);
#endif
  add_stripes_plainly(sums, data, stripes, secret);
}

void scramble(Sums& sums) noexcept {
  constexpr std::size_t secret = kSecretBytes - Xxh3::kStripeBytes;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = (sums[i] ^ (sums[i] >> 47U) ^ read64(kSecret + secret + 8 * i)) * kPrime32_1;
  }
}

/// Whole stripes, wherever in its block the first one stands.
void add_blocks(Sums& sums, std::size_t& in_block, const std::byte* data, std::size_t stripes) noexcept {
  while (stripes != 0) {
    const std::size_t now = std::min(stripes, kBlockStripes - in_block);
    add_stripes(sums, data, now, 8 * in_block);
    data += now * Xxh3::kStripeBytes;
    stripes -= now;
    in_block += now;
    if (in_block == kBlockStripes) {
      scramble(sums);
      in_block = 0;
    }
  }
}

}  // namespace

Xxh3::Xxh3() noexcept
    : sums_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {}

void Xxh3::consume(const std::byte* data, std::size_t stripes) noexcept {
  add_blocks(sums_, stripes_, data, stripes);
}

void Xxh3::update(const std::byte* data, std::uint64_t bytes) noexcept {
  total_bytes_ += bytes;
  if (bytes <= kBufferBytes - buffered_) {
    if (bytes != 0) std::memcpy(buffer_.data() + buffered_, data, bytes);
    buffered_ += bytes;
    return;
  }
  if (buffered_ != 0) {
    const std::size_t fill = kBufferBytes - buffered_;
    std::memcpy(buffer_.data() + buffered_, data, fill);
    data += fill;
    bytes -= fill;
    consume(buffer_.data(), kBufferBytes / kStripeBytes);
  }
  if (bytes > kBufferBytes) {
    const std::uint64_t stripes = (bytes - 1) / kStripeBytes;
    consume(data, stripes);
    data += stripes * kStripeBytes;
    bytes -= stripes * kStripeBytes;
    std::memcpy(buffer_.data() + kBufferBytes - kStripeBytes, data - kStripeBytes, kStripeBytes);
  }
  std::memcpy(buffer_.data(), data, bytes);
  buffered_ = bytes;
}

std::uint64_t Xxh3::digest() const noexcept {
  return total_bytes_ <= kShortBytes ? hash_short(buffer_.data(), buffered_) : digest_long();
}

std::uint64_t Xxh3::digest_long() const noexcept {
  alignas(64) Sums sums = sums_;
  std::size_t in_block = stripes_;
  std::array<std::byte, kStripeBytes> last;
  if (buffered_ >= kStripeBytes) {
    add_blocks(sums, in_block, buffer_.data(), (buffered_ - 1) / kStripeBytes);
    std::memcpy(last.data(), buffer_.data() + buffered_ - kStripeBytes, kStripeBytes);
  } else {
    const std::size_t before = kStripeBytes - buffered_;
    std::memcpy(last.data(), buffer_.data() + kBufferBytes - before, before);
    std::memcpy(last.data() + before, buffer_.data(), buffered_);
  }
  add_stripe(sums, last.data(), kSecretBytes - kStripeBytes - 7);
  std::uint64_t hash = total_bytes_ * kPrime64_1;
  for (std::size_t i = 0; i < 4; ++i) {
    hash += fold_product(sums[2 * i] ^ read64(kSecret + 11 + 16 * i), sums[2 * i + 1] ^ read64(kSecret + 19 + 16 * i));
  }
  return avalanche(hash);
}

}  // namespace kvlink::transport
