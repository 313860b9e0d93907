#include "kvlink/transport/chunk_header.hpp"

#include <concepts>
#include <cstring>

namespace kvlink::transport {
namespace {

// "kvc" and the version of this header.
constexpr std::uint32_t kMagic = 0x0163766bU;

/// Little-endian whatever the host is.
template <std::unsigned_integral Number>
std::byte* put(std::byte* out, Number number) noexcept {
  for (std::size_t index = 0; index < sizeof(Number); ++index) {
    *out++ = static_cast<std::byte>((number >> (8 * index)) & 0xffU);
  }
  return out;
}

template <std::unsigned_integral Number>
const std::byte* take(const std::byte* in, Number& number) noexcept {
  number = 0;
  for (std::size_t index = 0; index < sizeof(Number); ++index) {
    number |= static_cast<Number>(std::to_integer<Number>(*in++) << (8 * index));
  }
  return in;
}

}  // namespace

ChunkHeader::Encoded ChunkHeader::encode() const noexcept {
  Encoded encoded{};
  std::byte* out = put(encoded.data(), kMagic);
  std::memcpy(out, attempt.handoff.epoch.data(), attempt.handoff.epoch.size());
  out = put(out + attempt.handoff.epoch.size(), attempt.handoff.sequence);
  out = put(out, attempt.attempt);
  out = put(out, stream_begin);
  put(out, length);
  return encoded;
}

std::optional<ChunkHeader> ChunkHeader::decode(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() != encoded_bytes) return std::nullopt;
  std::uint32_t magic = 0;
  const std::byte* in = take(bytes.data(), magic);
  if (magic != kMagic) return std::nullopt;
  ChunkHeader header;
  std::memcpy(header.attempt.handoff.epoch.data(), in, header.attempt.handoff.epoch.size());
  in = take(in + header.attempt.handoff.epoch.size(), header.attempt.handoff.sequence);
  in = take(in, header.attempt.attempt);
  in = take(in, header.stream_begin);
  take(in, header.length);
  return header;
}

}  // namespace kvlink::transport
