// Stage 4 for Python: reservations, and pushes into them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "handles.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvlink::bindings::epoch_of;
using kvlink::bindings::Handle;
using kvlink::bindings::integrity_of;
using kvlink::bindings::lane_of;
using kvlink::bindings::PushHandle;
using kvlink::bindings::Table;
using kvlink::bindings::tables_of;
using kvlink::bindings::vector_of;
using kvlink::handoff::Engine;

Handle reserve(std::shared_ptr<Engine> engine, const std::vector<std::pair<std::uint64_t, nb::bytes>>& sources,
               const std::vector<Table>& blocks, std::uint64_t num_tokens, std::uint64_t skip_tokens,
               std::int64_t ttl_ms, const std::string& lane, const std::string& integrity, std::string label) {
  kvlink::handoff::ReserveOptions options{.sources = {},
                                          .blocks = tables_of(blocks),
                                          .num_tokens = num_tokens,
                                          .skip_tokens = skip_tokens,
                                          .ttl_ms = ttl_ms,
                                          .lane = {},
                                          .integrity = integrity_of(integrity),
                                          .label = std::move(label)};
  for (const auto& [peer, epoch] : sources) options.sources.push_back({.peer = peer, .epoch = epoch_of(epoch)});
  if (!lane.empty()) options.lane = lane_of(lane);
  const GilReleased released;
  auto handoff = engine->reserve(std::move(options));
  return {std::move(engine), std::move(handoff)};
}

PushHandle push(std::shared_ptr<Engine> engine, const std::pair<nb::bytes, std::uint64_t>& reservation,
                const std::vector<Table>& blocks, std::uint64_t num_tokens, std::int64_t deadline_ms, bool at_once,
                const std::string& integrity, std::string label) {
  kvlink::handoff::PushOptions options{
      .reservation = {.epoch = epoch_of(reservation.first), .sequence = reservation.second},
      .blocks = tables_of(blocks),
      .num_tokens = num_tokens,
      .deadline_ms = deadline_ms,
      .at_once = at_once,
      .integrity = integrity_of(integrity),
      .label = std::move(label)};
  const GilReleased released;
  auto pushed = engine->push(std::move(options));
  return {{std::move(engine), std::move(pushed.handle)}, std::move(pushed.state), pushed.reservation};
}

}  // namespace

void bind_push_calls(nb::class_<Engine>& engine) {
  engine
      .def("reserve", &reserve, "sources"_a, nb::kw_only(), "blocks"_a, "num_tokens"_a, "skip_tokens"_a, "ttl_ms"_a,
           "lane"_a, "integrity"_a = "", "label"_a,
           "Hold blocks to be pushed into: by whoever comes first, or by each of `sources`, which are peers and their "
           "epochs. `lane` and `integrity` as of a pull.")
      .def("push", &push, "reservation"_a, nb::kw_only(), "blocks"_a, "num_tokens"_a, "deadline_ms"_a, "at_once"_a,
           "integrity"_a = "", "label"_a,
           "Push into the reservation of this (epoch, sequence). `blocks` are those that there are by now. With "
           "`at_once` nothing moves before it is committed.");
}

void bind_push_handle(nb::module_& m) {
  const auto flag = nb::call_guard<GilReleased>();
  nb::class_<PushHandle, Handle>(m, "Push", "One push of this node. Thread-safe; nothing waits.")
      .def(
          "start",
          [](const PushHandle& self, std::uint64_t peer) {
            self.engine->start_push({self.handoff, self.state, self.reservation}, peer);
          },
          "peer"_a, flag, "Push to this claimant, who has reserved, now that it is connected.")
      .def(
          "fail",
          [](const PushHandle& self, const std::string& code, std::string message) {
            self.engine->fail(self.handoff, {code_of_class_name(code.c_str()), std::move(message)});
          },
          nb::kw_only(), "code"_a, "message"_a, flag, "Fail it with this error class and message.")
      .def(
          "add",
          [](const PushHandle& self, const std::vector<Table>& blocks) {
            const auto more = tables_of(blocks);
            const GilReleased released;
            self.state->add(more);
          },
          "blocks"_a, "Hold more blocks, which follow those of before.")
      .def(
          "hold_back",
          [](const PushHandle& self, const std::vector<std::string>& layers, std::uint64_t first, std::uint64_t end) {
            return self.state->hold_back(layers, first, end);
          },
          "layers"_a, "first"_a, "end"_a, flag,
          "Say that these layers, or all, will be ready for these tokens, once the number is announced.")
      .def(
          "announce",
          [](const PushHandle& self, std::uint64_t number) {
            self.state->announce(number);
            self.engine->tell_ready(self.handoff);
          },
          "number"_a, flag, "Say that what was held back under this number is ready.")
      .def(
          "commit",
          [](const PushHandle& self, const nb::bytes& payload) {
            auto bytes = vector_of(payload);
            const GilReleased released;
            self.state->commit(std::move(bytes));
            self.engine->tell_ready(self.handoff);
          },
          "payload"_a, "Say that all is ready, but for what is held back, and that nothing more comes.");
}
