#include "kvlink/transport/chunk_router.hpp"

#include <utility>

namespace kvlink::transport {

void ChunkRouter::attach(const AttemptId& attempt, std::shared_ptr<ChunkSink> sink) {
  sinks_.insert_or_assign(attempt, std::move(sink));
}

void ChunkRouter::detach(const AttemptId& attempt) noexcept {
  sinks_.erase(attempt);
}

void ChunkRouter::deliver(std::span<const std::byte> header, ReceivedData data) noexcept {
  const auto decoded = ChunkHeader::decode(header);
  if (!decoded || decoded->length != data.bytes().size()) return refuse();
  const auto found = sinks_.find(decoded->attempt);
  if (found == sinks_.end()) return refuse();
  found->second->on_chunk(*decoded, std::move(data));
}

}  // namespace kvlink::transport
