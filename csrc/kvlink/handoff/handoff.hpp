// What a user holds of one handoff: its identity, how it stands, and its two events.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/error.hpp"
#include "kvlink/handoff/completions.hpp"
#include "kvlink/ids.hpp"
#include "kvlink/transport/waker.hpp"

namespace kvlink::handoff {

enum class Role : std::uint8_t { offer, pull, reservation, push };
[[nodiscard]] const char* role_name(Role role) noexcept;

enum class State : std::uint8_t {
  connecting,  // pull: no connection to the source yet
  claiming,    // pull: CLAIM is out
  waiting,     // pull: granted, until others have moved
  moving,      // pull: bytes are on their way
  checking,    // pull: all bytes are here, and both sides sum them
  converting,  // pull: all bytes are here, and become elements of this side's dtype
  confirming,  // pull: CONFIRM is out
  offered,     // offer: nobody reads yet
  granted,     // offer: somebody reads
  reserved,    // reservation: nobody pushes yet
  filling,     // reservation: until the source says that more is ready
  succeeded,
  failed,
};
[[nodiscard]] const char* state_name(State state) noexcept;

/// Heads and tokens of one part of the cache that did not arrive, or not as they were.
struct FailedRange {
  std::string group;
  std::string layer;
  std::string component;
  std::uint32_t first_head{};
  std::uint32_t end_head{};
  std::uint64_t first_token{};
  std::uint64_t end_token{};
};

/// How a handoff ended. Written once, before `outcome`.
struct Result {
  std::optional<Failure> failure;
  std::vector<FailedRange> failed;
  std::uint64_t valid_prefix_tokens{};
  std::uint64_t bytes{};
  std::string lane;
  std::vector<std::pair<std::string, double>> phases_s;
  std::vector<std::byte> payload;
};

/// The bells that tell Python of an event: one for engines (`fileno`), one for awaiting coroutines.
struct Bells {
  transport::Waker engine;
  transport::Waker awaiters;
  void ring() const noexcept {
    engine.ring();
    awaiters.ring();
  }
};

/// Thread-safe. The progress thread writes, any thread reads and waits.
class Handoff {
 public:
  Handoff(Role role, AttemptId id, std::string label, State state, std::shared_ptr<const Bells> bells);

  [[nodiscard]] Role role() const noexcept { return role_; }
  [[nodiscard]] const AttemptId& id() const noexcept { return id_; }
  [[nodiscard]] const std::string& label() const noexcept { return label_; }
  [[nodiscard]] State state() const noexcept { return state_.load(); }
  [[nodiscard]] bool has_outcome() const noexcept;
  [[nodiscard]] bool released() const noexcept;
  /// A copy of the result, once there is an outcome.
  [[nodiscard]] std::optional<Result> result() const;

  /// Both wait at most `timeout_ns` and return whether the event has come.
  [[nodiscard]] bool wait_outcome(std::int64_t timeout_ns) const;
  [[nodiscard]] bool wait_released(std::int64_t timeout_ns) const;

  /// From now on both events go there too, each once and in their order, also if they have come already.
  void report_to(std::shared_ptr<Completions> completions, std::uint64_t token);

  void set_state(State state) noexcept { state_.store(state); }
  /// First call wins; later ones change nothing and return false.
  bool settle(Result result);
  void release();

 private:
  [[nodiscard]] bool wait(std::int64_t timeout_ns, const bool& event) const;

  const Role role_;
  const AttemptId id_;
  const std::string label_;
  const std::shared_ptr<const Bells> bells_;
  std::atomic<State> state_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool outcome_{false};
  bool released_{false};
  Result result_;
  std::shared_ptr<Completions> completions_;  // null: nobody asked for them
  std::uint64_t token_{0};
};

}  // namespace kvlink::handoff
