// What the bindings of stage 4 share: the handle of a handoff, and how its arguments are read.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/handoff/engine.hpp"
#include "kvlink/handoff/handoff.hpp"

namespace kvlink::bindings {

namespace nb = nanobind;

using Table = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// A handle keeps its engine, so that `cancel` needs no more than the handle.
struct Handle {
  std::shared_ptr<handoff::Engine> engine;
  std::shared_ptr<handoff::Handoff> handoff;
};

/// One of a push has more to say.
struct PushHandle : Handle {
  std::shared_ptr<handoff::PushState> state;
  HandoffId reservation;
};

[[nodiscard]] inline Epoch epoch_of(const nb::bytes& bytes) {
  Epoch epoch;
  if (bytes.size() != epoch.size()) throw Error(Code::invalid_argument, "an epoch has 16 bytes");
  std::copy_n(static_cast<const std::uint8_t*>(bytes.data()), epoch.size(), epoch.begin());
  return epoch;
}

[[nodiscard]] inline std::vector<std::byte> vector_of(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

[[nodiscard]] inline handoff::BlockTables tables_of(const std::vector<Table>& tables) {
  handoff::BlockTables out;
  for (const Table& table : tables) out.emplace_back(table.data(), table.data() + table.size());
  return out;
}

[[nodiscard]] inline transport::Lane lane_of(const std::string& name) {
  if (const auto lane = transport::lane_from_name(name)) return *lane;
  throw Error(Code::invalid_argument, "no lane is called '" + name + "'; lanes are mapped, vectored, get and staged");
}

[[nodiscard]] inline transport::Integrity integrity_of(const std::string& name) {
  if (const auto integrity = transport::integrity_from_name(name)) return *integrity;
  throw Error(Code::invalid_argument, "no checksum is called '" + name + "'; there are crc32c and xxh3");
}

}  // namespace kvlink::bindings
