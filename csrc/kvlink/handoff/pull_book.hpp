// The target side: what this node reads from others. Progress thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kvlink/handoff/handoff.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/messages.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/handoff/services.hpp"
#include "kvlink/plan/copy_plan.hpp"

namespace kvlink::handoff {

/// What `Engine::pull` was asked for, after it was checked and its blocks are held.
struct PullRequest {
  std::shared_ptr<Handoff> handle;
  BlockTables blocks;   // the caller's tables, one a group, from token 0
  BlockTables written;  // the entries among them that are written, hence held
  std::uint64_t num_tokens{};
  std::uint64_t skip_tokens{};
  std::int64_t submitted_ns{};
  std::int64_t deadline_ns{};
  std::optional<transport::Lane> lane;  // required; none: the peer's best
};

class PullBook {
 public:
  explicit PullBook(Services& services) : services_(services) {}

  /// Starts when the peer is connected. A lost peer fails it at once.
  void submit(PullRequest request, const PeerPtr& peer);

  void on_peer_ready(const PeerPtr& peer);
  void on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant);
  void on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse);
  void on_valid(const PeerPtr& peer, const AttemptId& attempt);
  void on_peer_lost(const PeerPtr& peer);

  void cancel(const AttemptId& attempt, const Failure& failure);
  void close_all(const Failure& failure);
  /// After the threads that write have ended: lets go of what never drained by itself.
  void release_all();

  /// Watches deadlines and drives transfers. Returns whether anything happened.
  bool turn(std::int64_t now) noexcept;
  [[nodiscard]] std::int64_t next_deadline() const noexcept;
  /// Nothing of this book writes this node's memory any more.
  [[nodiscard]] bool drained() const noexcept { return pulls_.empty(); }

 private:
  struct Pull {
    PullRequest request;
    PeerPtr peer;
    transport::Lane lane{};
    std::shared_ptr<const plan::Plan> plan{};
    std::shared_ptr<transport::Transfer> transfer{};
    std::shared_ptr<transport::StagedReceiver> receiver{};
    std::vector<std::byte> payload{};
    bool settled{false};    // the outcome is out; what is left is to drain
    bool confirming{false};
    std::int64_t claimed_ns{0};
    std::int64_t granted_ns{0};
    std::int64_t started_ns{0};
    std::int64_t moved_ns{0};
  };
  using Pulls = std::map<AttemptId, Pull>;

  [[nodiscard]] Pull* find(const PeerPtr& peer, const AttemptId& attempt);
  void claim(Pull& pull);
  void start(Pull& pull);
  void confirm(Pull& pull);
  void succeed(Pull& pull);
  void fail(Pull& pull, const Failure& failure);
  [[nodiscard]] Result result_of(const Pull& pull) const;
  [[nodiscard]] std::shared_ptr<const plan::Plan> plan_of(const Pull& pull, const Grant& grant) const;
  /// Advances one transfer; true if it did anything.
  bool advance(Pull& pull);
  void finish(Pulls::iterator pull);
  void admit();

  Services& services_;
  Pulls pulls_;
  std::set<std::pair<std::int64_t, AttemptId>> deadlines_;  // of pulls without an outcome
  std::deque<AttemptId> waiting_;                           // granted, not started
  std::vector<AttemptId> moving_;                           // their transfers want turns
};

}  // namespace kvlink::handoff
