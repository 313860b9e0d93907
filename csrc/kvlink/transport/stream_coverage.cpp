#include "kvlink/transport/stream_coverage.hpp"

#include <iterator>

namespace kvlink::transport {

bool StreamCoverage::add(StreamRange range) {
  if (range.begin >= range.end || range.end > total_bytes_) return false;
  auto after = ranges_.lower_bound(range.begin);  // first that starts at or behind ours
  if (after != ranges_.end() && after->first < range.end) return false;
  auto before = after == ranges_.begin() ? ranges_.end() : std::prev(after);
  if (before != ranges_.end() && before->second > range.begin) return false;

  covered_bytes_ += range.end - range.begin;
  if (after != ranges_.end() && after->first == range.end) {
    range.end = after->second;
    ranges_.erase(after);
  }
  if (before != ranges_.end() && before->second == range.begin) {
    before->second = range.end;
  } else {
    ranges_.emplace(range.begin, range.end);
  }
  return true;
}

std::vector<StreamRange> StreamCoverage::missing() const {
  std::vector<StreamRange> gaps;
  std::uint64_t position = 0;
  for (const auto& [begin, end] : ranges_) {
    if (position < begin) gaps.push_back({position, begin});
    position = end;
  }
  if (position < total_bytes_) gaps.push_back({position, total_bytes_});
  return gaps;
}

}  // namespace kvlink::transport
