// Stage 4 for Python: the engine and the handles of its handoffs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "handles.hpp"
#include "kvlink/error.hpp"
#include "kvlink/handoff/completions.hpp"
#include "kvlink/handoff/engine.hpp"
#include "kvlink/handoff/handoff.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

namespace transport = kvlink::transport;
using kvlink::Code;
using kvlink::Error;
using kvlink::bindings::epoch_of;
using kvlink::bindings::Handle;
using kvlink::bindings::integrity_of;
using kvlink::bindings::lane_of;
using kvlink::bindings::Table;
using kvlink::bindings::tables_of;
using kvlink::bindings::vector_of;
using kvlink::handoff::Completions;
using kvlink::handoff::Engine;
using kvlink::handoff::Handoff;

/// Name, blocks, tokens a block, window (0: none), whether slots, and the number of the block pool.
using GroupNumbers = std::tuple<std::string, std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint32_t>;
using MintedId = std::pair<nb::bytes, std::uint64_t>;
using SourceNumbers = std::tuple<std::uint64_t, nb::bytes, std::uint64_t>;  // peer, epoch and sequence of the ticket

[[nodiscard]] std::int64_t nanoseconds(double seconds) {
  constexpr double kLongest = 1e9;  // 30 years: more would overflow
  return static_cast<std::int64_t>(std::clamp(seconds, 0.0, kLongest) * 1e9);
}

[[nodiscard]] nb::bytes to_bytes(const kvlink::Epoch& epoch) {
  return nb::bytes(epoch.data(), epoch.size());
}
[[nodiscard]] nb::bytes to_bytes(const std::vector<std::byte>& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

[[nodiscard]] std::vector<std::string> names_of(const std::vector<transport::Lane>& lanes) {
  std::vector<std::string> names;
  for (const transport::Lane lane : lanes) names.emplace_back(transport::lane_name(lane));
  return names;
}

std::shared_ptr<Engine> make_engine(const nb::bytes& epoch, const std::vector<GroupNumbers>& groups,
                                    const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& regions,
                                    std::shared_ptr<transport::ucx::Context> ucx, unsigned copy_threads,
                                    std::uint32_t max_handoffs, std::int64_t lease_cap_ms,
                                    const std::pair<std::uint64_t, std::uint64_t>& windows,
                                    std::uint64_t max_quarantined_blocks,
                                    std::shared_ptr<kvlink::plan::Template> own_template,
                                    const std::shared_ptr<Engine>& bells_of) {
  kvlink::handoff::EngineOptions options{.epoch = epoch_of(epoch),
                                         .groups = {},
                                         .regions = {},
                                         .ucx = std::move(ucx),
                                         .copy_threads = copy_threads,
                                         .max_handoffs = max_handoffs,
                                         .lease_cap_ms = lease_cap_ms,
                                         .window = {.peer_bytes = windows.first, .node_bytes = windows.second},
                                         .max_quarantined_blocks = max_quarantined_blocks,
                                         .own_template = std::move(own_template),
                                         .bells = bells_of ? bells_of->bells() : nullptr};
  for (const auto& [name, num_blocks, block_tokens, window, slots, pool] : groups) {
    if (block_tokens == 0) throw Error(Code::invalid_argument, "group '" + name + "' has blocks of no tokens");
    options.groups.push_back({.name = name,
                              .num_blocks = num_blocks,
                              .block_tokens = block_tokens,
                              .window = window,
                              .slots = slots,
                              .pool = pool});
  }
  for (const auto& [address, bytes] : regions) {
    options.regions.push_back({.base = reinterpret_cast<std::byte*>(address), .bytes = bytes});
  }
  const GilReleased released;
  return std::make_shared<Engine>(std::move(options));
}

std::vector<std::string> attach_source(Engine& engine, std::uint64_t peer, int fd, std::uint8_t dialect,
                                       const nb::bytes& epoch, std::string name,
                                       std::shared_ptr<kvlink::plan::Template> geometry,
                                       std::shared_ptr<kvlink::plan::Conversion> conversion,
                                       std::vector<std::uint64_t> region_bytes,
                                       std::vector<std::uint64_t> region_addresses, const std::vector<int>& region_fds,
                                       int pid, const std::vector<nb::bytes>& keys, const nb::bytes& ucx_address,
                                       nb::handle same_host, const std::vector<std::string>& lanes) {
  transport::UniqueFd owned(fd);  // Taken over first: whatever throws from here on closes it.
  kvlink::handoff::SourceFacts facts{.region_bytes = std::move(region_bytes),
                                     .region_addresses = std::move(region_addresses),
                                     .region_fds = {},
                                     .pid = pid,
                                     .keys = {},
                                     .ucx_address = vector_of(ucx_address),
                                     .same_host = nb::cast<bool>(same_host)};
  for (const int region_fd : region_fds) facts.region_fds.emplace_back(region_fd);
  for (const nb::bytes& key : keys) facts.keys.push_back(vector_of(key));
  std::vector<transport::Lane> wanted;
  for (const std::string& lane : lanes) wanted.push_back(lane_of(lane));
  const kvlink::Epoch peer_epoch = epoch_of(epoch);
  const GilReleased released;
  return names_of(engine.attach_source(peer, owned.release(), dialect, peer_epoch, std::move(name), std::move(geometry),
                                       std::move(conversion), std::move(facts), wanted));
}

std::uint64_t attach_claimant(Engine& engine, int fd, std::uint8_t dialect, const nb::bytes& epoch, std::string name,
                              std::string address, std::shared_ptr<kvlink::plan::Template> geometry,
                              const nb::bytes& ucx_address, nb::handle same_host) {
  const kvlink::Epoch peer_epoch = epoch_of(epoch);
  std::vector<std::byte> ucx = vector_of(ucx_address);
  const auto on_this_host = nb::cast<bool>(same_host);
  const GilReleased released;
  return engine.attach_claimant(fd, dialect, peer_epoch, std::move(name), std::move(address), std::move(geometry),
                                std::move(ucx), on_this_host);
}

nb::list peers(Engine& engine) {
  std::vector<kvlink::handoff::PeerReport> reports;
  {
    const GilReleased released;
    reports = engine.peers();
  }
  nb::list out;
  for (const auto& report : reports) {
    constexpr const char* states[] = {"connecting", "ready", "lost"};
    nb::dict each;
    each["peer"] = report.id;
    each["role"] = report.role == kvlink::handoff::PeerRole::source ? "source" : "claimant";
    each["state"] = states[static_cast<std::size_t>(report.state)];
    each["name"] = report.name;
    each["address"] = report.address;
    each["epoch"] = to_bytes(report.epoch);
    each["lanes"] = names_of(report.lanes);
    each["given_up"] = report.given_up;
    each["transports"] = report.transports;
    each["handoffs"] = report.handoffs;
    each["bytes"] = report.bytes;
    each["bytes_per_s"] = report.bytes_per_s;
    out.append(each);
  }
  return out;
}

nb::dict counters(const Engine& engine) {
  const auto& values = engine.counters();
  nb::dict out;
  out["offers"] = values.offers.load();
  out["pulls"] = values.pulls.load();
  out["reservations"] = values.reservations.load();
  out["pushes"] = values.pushes.load();
  out["succeeded"] = values.succeeded.load();
  out["failed"] = values.failed.load();
  out["refused_claims"] = values.refused_claims.load();
  out["stale_messages"] = values.stale_messages.load();
  out["protocol_errors"] = values.protocol_errors.load();
  out["bytes_pulled"] = values.bytes_pulled.load();
  return out;
}

nb::dict holds(const Engine& engine) {
  const auto count = engine.holds();
  nb::dict out;
  out["shared"] = count.shared;
  out["exclusive"] = count.exclusive;
  out["quarantined"] = count.quarantined;
  out["handoffs"] = engine.counters().live.load();
  return out;
}

Handle offer(std::shared_ptr<Engine> engine, const std::vector<Table>& blocks, std::uint64_t num_tokens,
             std::int64_t ttl_ms, std::optional<std::int64_t> retry_ms, std::uint32_t readers, const nb::bytes& payload,
             std::string label, const std::string& integrity, std::optional<MintedId> minted) {
  kvlink::handoff::OfferOptions options{.blocks = tables_of(blocks),
                                        .num_tokens = num_tokens,
                                        .ttl_ms = ttl_ms,
                                        .retry_ms = retry_ms,
                                        .readers = readers,
                                        .integrity = integrity_of(integrity),
                                        .payload = vector_of(payload),
                                        .label = std::move(label),
                                        .id = {}};
  if (minted) options.id = kvlink::HandoffId{.epoch = epoch_of(minted->first), .sequence = minted->second};
  const GilReleased released;
  auto handoff = engine->offer(std::move(options));
  return {std::move(engine), std::move(handoff)};
}

Handle pull(std::shared_ptr<Engine> engine, const std::vector<SourceNumbers>& sources, const std::vector<Table>& blocks,
            std::uint64_t num_tokens, std::uint64_t skip_tokens, std::int64_t deadline_ms, const std::string& lane,
            const std::string& integrity, std::uint32_t ranks, std::string label) {
  kvlink::handoff::PullOptions options{.sources = {},
                                       .blocks = tables_of(blocks),
                                       .num_tokens = num_tokens,
                                       .skip_tokens = skip_tokens,
                                       .deadline_ms = deadline_ms,
                                       .lane = {},
                                       .integrity = integrity_of(integrity),
                                       .ranks = ranks,
                                       .label = std::move(label)};
  for (const auto& [peer, epoch, sequence] : sources) {
    options.sources.push_back({.peer = peer, .id = {.epoch = epoch_of(epoch), .sequence = sequence}});
  }
  if (!lane.empty()) options.lane = lane_of(lane);
  const GilReleased released;
  auto handoff = engine->pull(std::move(options));
  return {std::move(engine), std::move(handoff)};
}

using ErrorText = std::pair<std::string, std::string>;
using FailedText =
    std::tuple<std::string, std::string, std::string, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>;

nb::object error_in(const kvlink::handoff::Result& result) {
  if (!result.failure) return nb::none();
  return nb::cast(ErrorText(class_name_of(result.failure->code), result.failure->message));
}

nb::object error_of(const Handle& handle) {
  const auto result = handle.handoff->result();
  return result ? error_in(*result) : nb::none();
}

std::vector<FailedText> failed_in(const kvlink::handoff::Result& result) {
  std::vector<FailedText> out;
  for (const auto& range : result.failed) {
    out.emplace_back(range.group, range.layer, range.component, range.first_head, range.end_head, range.first_token,
                     range.end_token);
  }
  return out;
}

std::vector<FailedText> failed_of(const Handle& handle) {
  const auto result = handle.handoff->result();
  return result ? failed_in(*result) : std::vector<FailedText>();
}

nb::object outcome_of(const Handle& handle) {
  const auto result = handle.handoff->result();
  if (!result) return nb::none();
  return nb::cast(result->failure ? "failed" : "succeeded");
}

nb::dict phases_in(const kvlink::handoff::Result& result) {
  nb::dict out;
  for (const auto& [name, seconds] : result.phases_s) out[name.c_str()] = seconds;
  return out;
}

nb::dict phases_of(const Handle& handle) {
  const auto result = handle.handoff->result();
  return result ? phases_in(*result) : nb::dict();
}

/// All that an event tells, from one copy of the result.
nb::object ended_of(const Handle& handle) {
  const auto result = handle.handoff->result();
  if (!result) return nb::none();
  return nb::make_tuple(error_in(*result), failed_in(*result), result->valid_prefix_tokens, result->bytes, result->lane,
                        phases_in(*result), to_bytes(result->payload));
}

void bind_ends(nb::class_<Engine>& bound) {
  bound
      .def(
          "close",
          [](Engine& engine, double deadline_s, const std::string& code, std::string message) {
            engine.close(nanoseconds(deadline_s), {code_of_class_name(code.c_str()), std::move(message)});
          },
          nb::kw_only(), "deadline_s"_a, "code"_a = "Closed", "message"_a = "the node is closed",
          nb::call_guard<GilReleased>(),
          "Fail what lives with this class and message, wait for transfers to drain, end the threads. Idempotent.")
      .def(
          "refuse_new",
          [](Engine& engine, const std::string& code, std::string message) {
            engine.refuse_new({{code_of_class_name(code.c_str()), std::move(message)}});
          },
          nb::kw_only(), "code"_a, "message"_a, nb::call_guard<GilReleased>(),
          "Refuse offers, pulls and claims of what was not offered here with this class and message.")
      .def(
          "accept_new", [](Engine& engine) { engine.refuse_new(std::nullopt); }, nb::call_guard<GilReleased>(),
          "Take offers, pulls and claims again.");
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine> bound(m, "Engine", "The native node. Thread-safe; every call but `close` returns at once.");
  bind_ends(bound);
  bind_push_calls(bound);
  bound
      .def(nb::new_(&make_engine), nb::kw_only(), "epoch"_a, "groups"_a, "regions"_a, "ucx"_a.none(), "copy_threads"_a,
           "max_handoffs"_a, "lease_cap_ms"_a, "windows"_a, "max_quarantined_blocks"_a, "own_template"_a.none(),
           "bells_of"_a.none() = nb::none(),
           "Start the threads. `regions` are (address, nbytes), borrowed until `close` has returned. `windows` are the "
           "bytes that may be on their way here, from one peer and from all. `own_template` pairs the cache with "
           "itself. `bells_of` is the engine before this one.")
      .def(
          "fileno", [](const Engine& engine) { return engine.bells()->engine.fd(); },
          "Return an eventfd that becomes readable with every outcome and release.")
      .def(
          "wake_fd", [](const Engine& engine) { return engine.bells()->awaiters.fd(); },
          "Return a second such eventfd, for the dispatcher of awaiting coroutines.")
      .def(
          "ucx_address", [](const Engine& engine) { return to_bytes(engine.ucx_address()); },
          "Return the UCX worker's address; empty without UCX.")
      .def(
          "pack_keys",
          [](const Engine& engine) {
            nb::list keys;
            for (const auto& key : engine.packed_keys()) keys.append(to_bytes(key));
            return keys;
          },
          "Return one packed remote key a region; empty where memory is not offered to one-sided reads.")
      .def("expect_peer", &Engine::expect_peer, nb::kw_only(), "address"_a, nb::call_guard<GilReleased>(),
           "Return the number of a peer that Python will connect; pulls may be queued on it at once.")
      .def("attach_source", &attach_source, "peer"_a, nb::kw_only(), "fd"_a, "dialect"_a, "epoch"_a, "name"_a,
           "template"_a, "conversion"_a.none(), "region_bytes"_a, "region_addresses"_a, "region_fds"_a, "pid"_a,
           "keys"_a, "ucx_address"_a, "same_host"_a, "lanes"_a,
           "Connect an expected peer. Takes all descriptors over, also when it raises. Return usable lanes.")
      .def("attach_claimant", &attach_claimant, nb::kw_only(), "fd"_a, "dialect"_a, "epoch"_a, "name"_a, "address"_a,
           "template"_a, "ucx_address"_a, "same_host"_a,
           "Connect a peer that dialled. Takes `fd` over. Return its number.")
      .def(
          "fail_peer",
          [](Engine& engine, std::uint64_t peer, const std::string& code, std::string message) {
            engine.fail_peer(peer, {code_of_class_name(code.c_str()), std::move(message)});
          },
          "peer"_a, nb::kw_only(), "code"_a, "message"_a, nb::call_guard<GilReleased>(),
          "End a connection, or an attempt at one; what lives on it fails with this error class and message.")
      .def("is_peer_lost", &Engine::is_peer_lost, "peer"_a, nb::call_guard<GilReleased>(),
           "Return whether the connection, or the attempt at one, is over. Cheap.")
      .def("peers", &peers, "Return how each peer stands.")
      .def("holds", &holds, "Return how many blocks and handoffs are held.")
      .def("counters", &counters, "Return the engine's counters.")
      .def("offer", &offer, nb::kw_only(), "blocks"_a, "num_tokens"_a, "ttl_ms"_a, "retry_ms"_a = nb::none(),
           "readers"_a, "payload"_a, "label"_a, "integrity"_a = "", "minted"_a.none() = nb::none(),
           "Offer blocks to be read. `integrity` names the checksum for readers that demand none. `minted` is the "
           "(epoch, sequence) of a ticket made elsewhere.")
      .def("pull", &pull, "sources"_a, nb::kw_only(), "blocks"_a, "num_tokens"_a, "skip_tokens"_a, "deadline_ms"_a,
           "lane"_a, "integrity"_a = "", "ranks"_a = 1, "label"_a,
           "Read an offer's blocks from its sources, each a (peer, epoch, sequence). `lane` may be empty: each peer's "
           "best. `integrity`, if not empty, is demanded of every source. `ranks` nodes pull as one reader.");
}

void bind_handle(nb::module_& m) {
  const auto flag = nb::call_guard<GilReleased>();
  nb::class_<Handle>(m, "Handoff", "One handoff of this node. Thread-safe.")
      .def_prop_ro("epoch", [](const Handle& self) { return to_bytes(self.handoff->id().handoff.epoch); })
      .def_prop_ro("sequence", [](const Handle& self) { return self.handoff->id().handoff.sequence; })
      .def_prop_ro("attempt", [](const Handle& self) { return self.handoff->id().attempt; })
      .def_prop_ro("label", [](const Handle& self) { return self.handoff->label(); })
      .def_prop_ro("kind", [](const Handle& self) { return kvlink::handoff::role_name(self.handoff->role()); })
      .def_prop_ro("state", [](const Handle& self) { return kvlink::handoff::state_name(self.handoff->state()); })
      .def_prop_ro("outcome", &outcome_of)
      .def_prop_ro("ended", &ended_of)
      .def_prop_ro("released", [](const Handle& self) { return self.handoff->released(); })
      .def_prop_ro("error", &error_of)
      .def_prop_ro("failed", &failed_of)
      .def_prop_ro("valid_prefix_tokens",
                   [](const Handle& self) {
                     const auto result = self.handoff->result();
                     return result ? result->valid_prefix_tokens : 0;
                   })
      .def_prop_ro("bytes",
                   [](const Handle& self) {
                     const auto result = self.handoff->result();
                     return result ? result->bytes : 0;
                   })
      .def_prop_ro("lane",
                   [](const Handle& self) {
                     const auto result = self.handoff->result();
                     return result ? result->lane : std::string();
                   })
      .def_prop_ro("phases_s", &phases_of)
      .def_prop_ro("payload",
                   [](const Handle& self) {
                     const auto result = self.handoff->result();
                     return to_bytes(result ? result->payload : std::vector<std::byte>());
                   })
      .def(
          "report_to",
          [](const Handle& self, std::shared_ptr<Completions> completions, std::uint64_t token) {
            self.handoff->report_to(std::move(completions), token);
          },
          "completions"_a, "token"_a, flag, "Have both events put there, also those that have come already.")
      .def(
          "cancel", [](const Handle& self) { self.engine->cancel(self.handoff); }, flag)
      .def(
          "wait",
          [](const Handle& self, double timeout_s) { return self.handoff->wait_outcome(nanoseconds(timeout_s)); },
          nb::kw_only(), "timeout_s"_a, flag, "Wait for the outcome; return whether it has come.")
      .def(
          "wait_released",
          [](const Handle& self, double timeout_s) { return self.handoff->wait_released(nanoseconds(timeout_s)); },
          nb::kw_only(), "timeout_s"_a, flag, "Wait until the blocks are released; return whether they are.");
}

}  // namespace

void bind_completions(nb::module_& m) {
  nb::class_<Completions>(m, "Completions", "Events of submitted handoffs, until they are taken. Thread-safe.")
      .def(nb::new_([](const Engine& engine) { return std::make_shared<Completions>(engine.bells()); }), "engine"_a,
           "Ring the bells that `engine` rings.")
      .def("add_ended", &Completions::add_ended, "token"_a, "Add both events of something that never started.")
      .def(
          "take",
          [](Completions& self, std::size_t most, bool resets_bell) {
            nb::list out;
            for (const auto& entry : self.take(most, resets_bell))
              out.append(nb::make_tuple(entry.token, entry.released));
            return out;
          },
          "most"_a, nb::kw_only(), "resets_bell"_a,
          "Return the oldest events as (token, whether it is the release). With `resets_bell`, `Engine.fileno` is read "
          "empty, and stays readable if there are more.");
}

void bind_handoff(nb::module_& m) {
  bind_engine(m);
  bind_completions(m);
  bind_handle(m);
  bind_push_handle(m);
}
