// The target side: what this node reads from others. Progress thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "kvlink/handoff/handoff.hpp"
#include "kvlink/handoff/heartbeat.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/messages.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/handoff/receive_window.hpp"
#include "kvlink/handoff/reservations.hpp"
#include "kvlink/handoff/services.hpp"
#include "kvlink/handoff/transitions.hpp"
#include "kvlink/plan/copy_plan.hpp"
#include "kvlink/plan/pieces.hpp"
#include "kvlink/plan/sum_cells.hpp"
#include "kvlink/transport/integrity.hpp"
#include "kvlink/transport/scratch_memory.hpp"
#include "kvlink/transport/summing.hpp"

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
  transport::Integrity integrity{};     // demanded; none: as each source offers
  std::uint32_t ranks{1};               // that pull the same ticket as one reader
  bool is_reservation{false};           // its one part waits for a push, under the id of the reservation
};

class PullBook {
 public:
  /// `table`: another one than the project's only in tests that look for rows that do not matter.
  PullBook(Services& services, const WindowLimits& window, std::span<const Row> table = kTransitions)
      : services_(services), window_(window), table_(table) {}

  /// Each part starts when its peer is connected, or, of a reservation, when somebody pushes. A lost peer fails the
  /// pull at once.
  void submit(PullRequest request);

  void on_peer_ready(const PeerPtr& peer);
  void on_grant(const PeerPtr& peer, const AttemptId& attempt, Grant grant);
  void on_refuse(const PeerPtr& peer, const AttemptId& attempt, const Refuse& refuse);
  void on_sums(const PeerPtr& peer, const AttemptId& attempt, const Sums& sums);
  void on_valid(const PeerPtr& peer, const AttemptId& attempt);
  void on_push(const PeerPtr& peer, const HandoffId& reservation, const Push& push);
  void on_piece(const PeerPtr& peer, const AttemptId& attempt, const Ready& ready);
  void on_commit(const PeerPtr& peer, const AttemptId& attempt, std::vector<std::byte> payload);
  void on_peer_lost(const PeerPtr& peer);

  void cancel(const AttemptId& handle, const Failure& failure);
  void close_all(const Failure& failure);
  /// After the threads that write have ended: lets go of what never drained by itself.
  void drop_transfers();
  /// Releases what is left. After `drop_transfers` and the end of UCX's worker: until then gets may land.
  void release_all();

  /// Watches deadlines, drives transfers and renews leases. Returns whether anything happened.
  bool turn(std::int64_t now) noexcept;
  [[nodiscard]] std::int64_t next_deadline() const noexcept;
  /// Nothing of this book writes this node's memory any more.
  [[nodiscard]] bool drained() const noexcept { return pulls_.empty(); }

 private:
  /// One pull: what its parts share.
  struct Pull {
    At at{At::none};
    PullRequest request;
    std::size_t parts_unmoved{};  // parts whose bytes are not all here
    std::size_t parts_invalid{};  // parts without VALID
    std::size_t parts_unsound{};  // parts whose sums differ
    std::size_t parts_live{};     // parts that may still write
    Result result{};              // grows until it is handed to the handle
    std::int64_t claimed_ns{0};   // the latest of the parts, as are the next two
    std::int64_t granted_ns{0};
    std::int64_t moved_ns{0};
    std::int64_t checked_ns{0};
    std::int64_t converted_ns{0};
    std::int64_t started_ns{0};  // the earliest of the parts
    std::uint64_t post_ns{0};
  };
  using PullPtr = std::shared_ptr<Pull>;

  /// What the source of a push has said so far.
  struct Filling {
    Grant terms{};  // of the grant; its tables grow
    plan::Coverage coverage;
    std::vector<plan::Piece> pieces{};  // that are ready, and have not moved
    std::vector<bool> layers{};         // of the one that moves
    bool has_piece{false};              // `plan` is that of pieces; otherwise of all, once everything has moved
    bool committed{false};
    std::vector<std::byte> payload{};
  };

  /// What one source delivers.
  struct Part {
    At at{At::connecting};
    PullPtr pull;
    AttemptId attempt;
    PeerPtr peer;
    bool first{false};  // the source whose payload counts
    transport::Lane lane{};
    std::int64_t claimed_ns{0};
    std::shared_ptr<const plan::Plan> plan{};
    std::shared_ptr<transport::Transfer> transfer{};
    std::shared_ptr<transport::StagedReceiver> receiver{};
    std::unique_ptr<Filling> filling{};  // of a push only
    bool has_turns{false};               // it is among `moving_`
    // Where the peer's elements are converted only.
    std::shared_ptr<const plan::Plan> convert_plan{};
    bool dense{false};  // so that it is known what scratch memory takes
    std::shared_ptr<const transport::ScratchMemory> scratch{};
    std::shared_ptr<transport::Transfer> converting{};
    // With integrity only.
    transport::Integrity integrity{};
    std::shared_ptr<const plan::SumCells> cells{};
    std::vector<std::byte> source_sums{};           // as far as they have come
    std::shared_ptr<transport::Summing> summing{};  // of what has arrived
    bool checked{false};                            // both are complete and compared

    /// The plan of everything, once it is known.
    [[nodiscard]] const plan::Plan* whole_plan() const noexcept {
      return filling && (filling->has_piece || !filling->committed) ? nullptr : plan.get();
    }
    [[nodiscard]] std::uint64_t total_sum_bytes() const noexcept {
      return cells ? cells->count() * sum_bytes(integrity) : 0;
    }
  };
  using PartPtr = std::shared_ptr<Part>;

  /// What an event of a part brings along.
  struct News {
    PeerPtr peer{};  // whom it is from
    Grant* grant{nullptr};
    const Sums* sums{nullptr};
    const Push* push{nullptr};
    const plan::Piece* piece{nullptr};
    const Ready* ready{nullptr};
    std::vector<std::byte>* payload{nullptr};
    std::optional<Failure> failure{};  // what it means, should the row say that the pull fails
  };
  /// Why a pull ends before its time.
  struct Cause {
    PeerPtr culprit;
    Failure failure;
  };

  // How the table is carried out: pull_steps.cpp.
  void step_pull(const PullPtr& pull, On event, const Cause* cause = nullptr);
  /// `part`: null where no live part has the attempt.
  void step_part(const PartPtr& part, On event, const News& news);
  [[nodiscard]] static Set<If> guards_of(const Pull& pull);
  [[nodiscard]] Set<If> guards_of(const Part& part, const News& news) const;
  void enter(const PartPtr& part, At to);
  void perform(Do action, const PullPtr& pull, const Cause* cause);
  void perform(Do action, const PartPtr& part, const News& news);
  void ask_parts(const PullPtr& pull);
  void tell_parts(const PullPtr& pull, On event);
  void quarantine(const Pull& pull);
  void note_failure(Pull& pull, const Cause& cause);
  /// What a pull wants by a template; the blocks of the source are not known.
  [[nodiscard]] static plan::Plan wanted_of(const PullRequest& request,
                                            const std::shared_ptr<const plan::Template>& geometry);
  static void note_missing(const plan::Template& geometry, std::span<const plan::FailedRange> ranges, Result& result);
  static void note_all_of(const plan::Plan& plan, Result& result);
  void note_all_missing(const Pull& pull, Result& result) const;
  void note_corruption(Pull& pull);
  [[nodiscard]] static std::vector<plan::FailedRange> differing(const Part& part);
  [[nodiscard]] std::uint64_t valid_prefix_of(const Pull& pull) const;
  void note_success(Pull& pull);
  void settle(Pull& pull);
  void send_claim(Part& part);
  void make_plan(const PartPtr& part, Grant& grant);
  [[nodiscard]] std::vector<std::vector<plan::BlockPair>> pairs_of(const Part& part, const Grant& grant) const;
  void start_transfer(const PartPtr& part);
  // Of pushes: push_parts.cpp.
  void note_push_guards(const Part& part, const News& news, Set<If>& holding) const;
  [[nodiscard]] static bool piece_fits(const Part& part, const News& news);
  [[nodiscard]] bool push_fits(const Part& part, const News& news) const;
  void perform_push(Do action, const PartPtr& part, const News& news);
  void adopt_source(const PartPtr& part, const News& news);
  void send_decline(const PartPtr& part, const News& news) const;
  void open_pieces(const PartPtr& part, const News& news);
  void look_on(const PartPtr& part);
  void next_plan(Part& part) const;
  void check_terms(const Part& part, const Grant& grant) const;
  void want_turns(Part& part);
  void perform_check(Do action, const PartPtr& part, const News& news);
  static void send_check(Part& part);
  void sum_blocks(const PartPtr& part);
  void take_sums(const PartPtr& part, const Sums& sums);
  // Elements in another dtype: pull_conversion.cpp.
  [[nodiscard]] static std::shared_ptr<const plan::Plan> plan_of(Part& part,
                                                                 std::vector<std::vector<plan::BlockPair>> pairs);
  /// What the lane writes: this node's memory, and scratch memory where there is something to convert.
  [[nodiscard]] std::shared_ptr<const transport::LocalMemory> memory_of(Part& part) const;
  void convert_blocks(const PartPtr& part);
  void let_go_of_scratch(Part& part);
  void fail(const PartPtr& part, const Failure& failure);
  [[nodiscard]] static Failure failure_of(const Part& part, const News& news);

  [[nodiscard]] PartPtr find(const AttemptId& attempt) const;
  /// Advances one transfer; true if it did anything.
  bool advance(Part& part);
  void admit();

  Services& services_;
  ReceiveWindow window_;  // of parts that are granted: which may start
  std::span<const Row> table_;
  std::map<AttemptId, PartPtr> parts_;
  std::map<AttemptId, PullPtr> pulls_;                      // by the attempt of the handle
  std::set<std::pair<std::int64_t, AttemptId>> deadlines_;  // of pulls without an outcome, likewise
  Reservations reservations_;
  std::vector<AttemptId> moving_;  // parts whose transfers want turns
  Heartbeat heartbeat_;
};

}  // namespace kvlink::handoff
