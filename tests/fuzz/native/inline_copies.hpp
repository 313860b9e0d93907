// Copy threads without threads: what they are given is done at once, so that an input does the same each time.
//
// Stands in for transport/copy_threads.cpp; to be included by one source of a target.
#pragma once

#include <memory>
#include <utility>

#include "kvlink/transport/copy_threads.hpp"

namespace kvlink::transport {

CopyThreads::CopyThreads(unsigned threads) : count_(threads) {}
CopyThreads::~CopyThreads() = default;
bool CopyThreads::submit(std::shared_ptr<CopyJob> job) noexcept {
  while (const auto piece = job->claim()) job->run(*piece);
  return true;
}
bool CopyThreads::submit_once(const std::function<void()>& work) noexcept {
  work();
  return true;
}

}  // namespace kvlink::transport
