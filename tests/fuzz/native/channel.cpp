// A control connection whose peer sends anything, cut anywhere: the same frames come out however the bytes were cut,
// and nothing after the first that is none.
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "fuzz.hpp"
#include "kvlink/handoff/channel.hpp"
#include "kvlink/transport/unique_fd.hpp"

namespace {

using namespace kvlink;
using namespace kvlink::handoff;
using fuzz::Bytes;

using Seen = std::vector<std::pair<Header, std::vector<std::byte>>>;

/// The frames that a stream holds, and whether something in it is none.
std::pair<Seen, bool> frames_of(Bytes stream, std::uint8_t dialect) {
  Seen frames;
  while (stream.size() >= kHeaderBytes) {
    const auto header = parse_header(stream.first<kHeaderBytes>());
    if (!header || header->dialect != dialect) return {frames, true};
    if (stream.size() - kHeaderBytes < header->body_bytes) break;
    const Bytes body = stream.subspan(kHeaderBytes, header->body_bytes);
    frames.emplace_back(*header, std::vector(body.begin(), body.end()));
    stream = stream.subspan(kHeaderBytes + body.size());
  }
  return {frames, false};
}

bool same(const Seen& left, const Seen& right) {
  return std::ranges::equal(left, right, [](const auto& one, const auto& other) {
    return one.first.kind == other.first.kind && one.first.attempt == other.first.attempt && one.second == other.second;
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto dialect = static_cast<std::uint8_t>(input.below(kNewestDialect + 1));
  std::size_t cut = std::size_t{input.byte()} + 1;
  Bytes stream = input.bytes(size);
  const auto [expected, broken] = frames_of(stream, dialect);
  int ends[2];
  HOLDS(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  Channel channel(ends[0], dialect);
  transport::UniqueFd peer(ends[1]);
  Seen seen;
  const auto note = [&](const Header& header, Bytes body) {
    seen.emplace_back(header, std::vector(body.begin(), body.end()));
  };
  bool alive = true;
  while (alive && !stream.empty()) {
    const Bytes piece = stream.first(std::min(cut, stream.size()));
    HOLDS(::send(peer.value(), piece.data(), piece.size(), 0) == static_cast<ssize_t>(piece.size()));
    stream = stream.subspan(piece.size());
    alive = channel.receive(note);
    cut = cut * 2 + 1;  // so that a long input is no long loop
  }
  HOLDS(alive != broken && channel.broken() == broken);
  HOLDS(same(seen, expected));
  peer = transport::UniqueFd();
  HOLDS(!channel.receive(note) && !channel.why().empty());
  HOLDS(seen.size() == expected.size());
  return 0;
}
