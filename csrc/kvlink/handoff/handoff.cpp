#include "kvlink/handoff/handoff.hpp"

#include <chrono>

namespace kvlink::handoff {

const char* role_name(Role role) noexcept {
  switch (role) {
    case Role::offer:
      return "offer";
    case Role::pull:
      return "pull";
    case Role::reservation:
      return "reservation";
    case Role::push:
      return "push";
  }
  return "unknown";
}

const char* state_name(State state) noexcept {
  switch (state) {
    case State::connecting:
      return "connecting";
    case State::claiming:
      return "claiming";
    case State::waiting:
      return "waiting";
    case State::moving:
      return "moving";
    case State::checking:
      return "checking";
    case State::converting:
      return "converting";
    case State::confirming:
      return "confirming";
    case State::offered:
      return "offered";
    case State::granted:
      return "granted";
    case State::reserved:
      return "reserved";
    case State::filling:
      return "filling";
    case State::succeeded:
      return "succeeded";
    case State::failed:
      return "failed";
  }
  return "unknown";
}

Handoff::Handoff(Role role, AttemptId id, std::string label, State state, std::shared_ptr<const Bells> bells)
    : role_(role), id_(id), label_(std::move(label)), bells_(std::move(bells)), state_(state) {}

bool Handoff::has_outcome() const noexcept {
  const std::lock_guard lock(mutex_);
  return outcome_;
}

bool Handoff::released() const noexcept {
  const std::lock_guard lock(mutex_);
  return released_;
}

std::optional<Result> Handoff::result() const {
  const std::lock_guard lock(mutex_);
  return outcome_ ? std::optional(result_) : std::nullopt;
}

bool Handoff::wait(std::int64_t timeout_ns, const bool& event) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&event] { return event; });
}

bool Handoff::wait_outcome(std::int64_t timeout_ns) const {
  return wait(timeout_ns, outcome_);
}

bool Handoff::wait_released(std::int64_t timeout_ns) const {
  return wait(timeout_ns, released_);
}

void Handoff::report_to(std::shared_ptr<Completions> completions, std::uint64_t token) {
  {
    const std::lock_guard lock(mutex_);
    if (outcome_) completions->add({.token = token, .released = false});
    if (released_) completions->add({.token = token, .released = true});
    completions_ = std::move(completions);
    token_ = token;
    if (!outcome_) return;
  }
  bells_->ring();
}

bool Handoff::settle(Result result) {
  {
    const std::lock_guard lock(mutex_);
    if (outcome_) return false;
    state_.store(result.failure ? State::failed : State::succeeded);
    result_ = std::move(result);
    outcome_ = true;
    if (completions_) completions_->add({.token = token_, .released = false});
  }
  changed_.notify_all();
  bells_->ring();
  return true;
}

void Handoff::release() {
  {
    const std::lock_guard lock(mutex_);
    if (released_) return;
    released_ = true;
    if (completions_) completions_->add({.token = token_, .released = true});
  }
  changed_.notify_all();
  bells_->ring();
}

}  // namespace kvlink::handoff
