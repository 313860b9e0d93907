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

/// One source of a pull, and the try at it.
struct PartRequest {
  AttemptId attempt;
  PeerPtr peer;
};

/// What `Engine::pull` was asked for, after it was checked and its blocks are held.
struct PullRequest {
  std::shared_ptr<Handoff> handle;
  std::vector<PartRequest> parts;  // the source ranks; each delivers what its connection's template says
  BlockTables blocks;              // the caller's tables, one a group, from token 0
  BlockTables written;             // the entries among them that are written, hence held
  std::uint64_t num_tokens{};
  std::uint64_t skip_tokens{};
  std::int64_t submitted_ns{};
  std::int64_t deadline_ns{};
  std::optional<transport::Lane> lane;  // required; none: each peer's best
};

class PullBook {
 public:
  explicit PullBook(Services& services) : services_(services) {}

  /// Each part starts when its peer is connected. A lost peer fails the pull at once.
  void submit(PullRequest request);

  void on_peer_ready(const PeerPtr& peer);
  void on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant);
  void on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse);
  void on_valid(const PeerPtr& peer, const AttemptId& attempt);
  void on_peer_lost(const PeerPtr& peer);

  void cancel(const AttemptId& handle, const Failure& failure);
  void close_all(const Failure& failure);
  /// After the threads that write have ended: lets go of what never drained by itself.
  void drop_transfers();
  /// Releases what is left. After `drop_transfers` and the end of UCX's worker: until then gets may land.
  void release_all();

  /// Watches deadlines and drives transfers. Returns whether anything happened.
  bool turn(std::int64_t now) noexcept;
  [[nodiscard]] std::int64_t next_deadline() const noexcept;
  /// Nothing of this book writes this node's memory any more.
  [[nodiscard]] bool drained() const noexcept { return pulls_.empty(); }

 private:
  /// One pull: what its parts share.
  struct Pull {
    PullRequest request;
    bool settled{false};          // the outcome is out; what is left is to drain
    std::size_t parts_unmoved{};  // parts whose bytes are not all here
    std::size_t parts_invalid{};  // parts without VALID
    std::size_t parts_live{};     // parts that may still write
    Result result{};              // grows until it is handed to the handle
    std::int64_t claimed_ns{0};   // the latest of the parts, as are the next two
    std::int64_t granted_ns{0};
    std::int64_t moved_ns{0};
    std::int64_t started_ns{0};  // the earliest of the parts
    std::uint64_t post_ns{0};
  };
  using PullPtr = std::shared_ptr<Pull>;

  /// What one source delivers.
  struct Part {
    PullPtr pull;
    AttemptId attempt;
    PeerPtr peer;
    bool first{false};  // the source whose payload counts
    transport::Lane lane{};
    bool claimed{false};
    bool granted{false};
    bool confirming{false};
    bool valid{false};
    std::shared_ptr<const plan::Plan> plan{};
    std::shared_ptr<transport::Transfer> transfer{};
    std::shared_ptr<transport::StagedReceiver> receiver{};
  };
  using Parts = std::map<AttemptId, Part>;

  [[nodiscard]] Part* find(const PeerPtr& peer, const AttemptId& attempt);
  void claim(Part& part);
  void start(Part& part);
  /// All bytes of the part are here. The last one confirms all: no source may count this reader while another can fail.
  void moved(Part& part);
  void confirm(Part& part);
  void fail(PullPtr pull, const Peer& culprit, const Failure& failure);
  void settle(PullPtr pull);
  [[nodiscard]] std::shared_ptr<const plan::Plan> plan_of(const Part& part, const Grant& grant) const;
  void note_missing(const Part& part, Result& result) const;
  /// Advances one transfer; true if it did anything.
  bool advance(Part& part);
  /// The part's transfer has drained.
  void finish(Part& part);
  /// The part will never write again: forgets it, and releases the pull with its last part.
  void retire(Parts::iterator part);
  void admit();

  Services& services_;
  Parts parts_;
  std::map<AttemptId, PullPtr> pulls_;                      // by the attempt of the handle
  std::set<std::pair<std::int64_t, AttemptId>> deadlines_;  // of pulls without an outcome, likewise
  std::deque<AttemptId> waiting_;                           // parts that are granted, not started
  std::vector<AttemptId> moving_;                           // parts whose transfers want turns
};

}  // namespace kvlink::handoff
