// Reserving and pushing: what the owners of both ends call.
#include <algorithm>
#include <utility>

#include "kvlink/clock.hpp"
#include "kvlink/handoff/engine.hpp"

namespace kvlink::handoff {

std::shared_ptr<Handoff> Engine::reserve(ReserveOptions options) {
  if (options.skip_tokens > options.num_tokens) {
    throw Error(Code::invalid_argument, "skip_tokens is " + std::to_string(options.skip_tokens) + ", and " +
                                            std::to_string(options.num_tokens) + " tokens are reserved");
  }
  const auto request = hold_for_pull(std::move(options.blocks), options.skip_tokens, options.num_tokens,
                                     deadline_after(options.ttl_ms, "ttl"));
  services_.counters.reservations.fetch_add(1);
  const HandoffId reservation{.epoch = services_.epoch, .sequence = next_sequence_.fetch_add(1)};
  auto nobody = std::make_shared<Peer>();
  nobody->name = "nobody yet";
  request->names_sources = !options.sources.empty();
  for (std::size_t i = 0; i < std::max<std::size_t>(options.sources.size(), 1); ++i) {
    request->parts.push_back({.attempt = {.handoff = reservation, .attempt = next_attempt_.fetch_add(1)},
                              .peer = nobody,
                              .source = request->names_sources ? options.sources[i].epoch : Epoch{}});
  }
  const AttemptId id = request->parts.front().attempt;
  auto handle =
      std::make_shared<Handoff>(Role::reservation, id, std::move(options.label), State::reserved, services_.bells);
  request->handle = handle;
  request->lane = options.lane;
  request->integrity = options.integrity;
  request->is_reservation = true;
  try {
    {
      const std::lock_guard lock(mutex_);
      check_taking();
    }
    post([this, sources = std::move(options.sources), request] {
      for (std::size_t i = 0; i < sources.size(); ++i) request->parts[i].peer = peer_or_lost(sources[i].peer);
      pulls_.submit(std::move(*request));
    });
  } catch (...) {
    let_go(*request);
    throw;
  }
  return handle;
}

Pushed Engine::push(PushOptions options) {
  if (!services_.own_template) throw Error(Code::invalid_argument, "this engine was started without its own template");
  const std::int64_t deadline_ns = deadline_after(options.deadline_ms, "deadline");
  auto state =
      std::make_shared<PushState>(services_.holds, services_.own_template, options.num_tokens, options.at_once);
  state->add(options.blocks);
  admit_one();
  services_.counters.pushes.fetch_add(1);
  const AttemptId id{.handoff = {.epoch = services_.epoch, .sequence = next_sequence_.fetch_add(1)}, .attempt = 0};
  auto handle = std::make_shared<Handoff>(Role::push, id, std::move(options.label), State::offered, services_.bells);
  const std::lock_guard lock(mutex_);  // As in `offer`.
  try {
    check_taking();
  } catch (...) {
    services_.counters.live.fetch_sub(1);
    throw;
  }
  // Its deadline is no lease that a reader may renew.
  offers_.add({.handle = handle,
               .blocks = {},
               .num_tokens = options.num_tokens,
               .expires_ns = deadline_ns,
               .ttl_ms = options.deadline_ms,
               .cap_ns = deadline_ns,
               .readers = 1,
               .integrity = options.integrity,
               .payload = {},
               .push = state,
               .reservation = options.reservation});
  return {std::move(handle), std::move(state), options.reservation};
}

void Engine::start_push(const Pushed& push, std::uint64_t peer) {
  post([this, push, peer] {
    const HandoffId id = push.handle->id().handoff;
    if (!push.handle->has_outcome()) return offers_.start_push(id, peer_or_lost(peer));
    OfferBook::call_off_push(peer_or_lost(peer), push.reservation,
                             {.offer = id, .num_tokens = push.state->num_tokens()});
  });
}

void Engine::tell_ready(const std::shared_ptr<Handoff>& handle) {
  if (handle->has_outcome()) return;
  post([this, handle] { offers_.tell_ready(handle->id().handoff); });
}

}  // namespace kvlink::handoff
