// The native node: one progress thread over every connection, timer and transfer. What Python calls is thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "kvlink/handoff/offer_book.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/handoff/pull_book.hpp"
#include "kvlink/handoff/services.hpp"
#include "kvlink/transport/poller.hpp"
#include "kvlink/transport/ucx/context.hpp"
#include "kvlink/transport/ucx/memory_region.hpp"

namespace kvlink::handoff {

struct EngineOptions {
  Epoch epoch{};
  std::vector<Group> groups;
  std::vector<transport::LocalRegion> regions;   // borrowed until `close` has returned
  std::shared_ptr<transport::ucx::Context> ucx;  // null: only the lanes of one host
  unsigned copy_threads{1};
  std::uint32_t max_handoffs{4096};
  std::int64_t lease_cap_ms{300'000};  // readers extend no offer past this age; one that lasts longer, not at all
  WindowLimits window{};
  std::uint64_t max_quarantined_blocks{16'384};        // no new pulls while more are in quarantine
  std::shared_ptr<const plan::Template> own_template;  // the cache paired with itself; see Services
  std::shared_ptr<const Bells> bells;  // of the engine before, so that descriptors outlive it; null: new ones
};

struct OfferOptions {
  BlockTables blocks;
  std::uint64_t num_tokens{};
  std::int64_t ttl_ms{};
  std::optional<std::int64_t> retry_ms;  // see OfferRequest
  std::uint32_t readers{1};
  transport::Integrity integrity{};
  std::vector<std::byte> payload;
  std::string label;
  std::optional<HandoffId> id;  // from a mint; none: this node's next
};

/// One source rank of a pull: the peer's number and the ticket's id there.
struct PullSource {
  std::uint64_t peer{};
  HandoffId id;
};

struct PullOptions {
  std::vector<PullSource> sources;
  BlockTables blocks;
  std::uint64_t num_tokens{};
  std::uint64_t skip_tokens{};
  std::int64_t deadline_ms{};
  std::optional<transport::Lane> lane;
  transport::Integrity integrity{};  // that every source must give; none: as it offers
  std::uint32_t ranks{1};            // nodes that pull the ticket together, as one of its readers
  std::string label;
};

/// One source rank that a reservation is for: the number of the peer that is or will be connected, and its life.
struct ReserveSource {
  std::uint64_t peer{};
  Epoch epoch{};
};

struct ReserveOptions {
  std::vector<ReserveSource> sources;  // who push, each its share; none: one node, whichever comes first
  BlockTables blocks;
  std::uint64_t num_tokens{};
  std::uint64_t skip_tokens{};
  std::int64_t ttl_ms{};
  std::optional<transport::Lane> lane;
  transport::Integrity integrity{};  // as of a pull
  std::string label;
};

struct PushOptions {
  HandoffId reservation;
  BlockTables blocks;  // those that there are by now
  std::uint64_t num_tokens{};
  std::int64_t deadline_ms{};
  bool at_once{false};               // nothing moves before it is committed
  transport::Integrity integrity{};  // as of an offer
  std::string label;
};

/// What a push is told through, next to its handle.
struct Pushed {
  std::shared_ptr<Handoff> handle;
  std::shared_ptr<PushState> state;
  HandoffId reservation;
};

/// How a peer stands, for people and metrics.
struct PeerReport {
  std::uint64_t id{};
  PeerRole role{};
  PeerState state{};
  std::string name;
  std::string address;
  Epoch epoch{};
  std::vector<transport::Lane> lanes;
  std::string given_up;  // why the first lane that was opened is not among them
  std::string transports;
  std::uint64_t handoffs{};
  std::uint64_t bytes{};
  double bytes_per_s{};
};

/// When so many milliseconds from now is. Throws Error(invalid_argument) unless it is within a week.
[[nodiscard]] std::int64_t deadline_after(std::int64_t duration_ms, const char* what);

class Engine {
 public:
  /// Starts the threads. Throws Error(invalid_argument) for a geometry that cannot be, Error(out_of_memory),
  /// Error(ucx_unavailable), Error(transport_failed) when UCX cannot register a region.
  explicit Engine(EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Fails what lives with `why`, waits at most `timeout_ns` for transfers to drain, ends the threads.
  /// Idempotent; afterwards every other call throws an Error like `why`.
  void close(std::int64_t timeout_ns, const Failure& why = {Code::closed, "the node is closed"});
  /// From now on offers and pulls throw an Error like `why`, and claims of what was not offered here are refused so.
  /// What lives goes on, claims of live offers included. None: everything is taken again.
  void refuse_new(const std::optional<Failure>& why);

  [[nodiscard]] const std::shared_ptr<const Bells>& bells() const noexcept { return services_.bells; }
  [[nodiscard]] std::vector<std::byte> ucx_address() const;
  [[nodiscard]] std::vector<std::vector<std::byte>> packed_keys() const;

  /// A peer that Python is about to connect to. Pulls may be given to it at once.
  [[nodiscard]] std::uint64_t expect_peer(std::string address);
  /// Connects it. Takes `fd` over. `conversion`: of what comes in another dtype; null: nothing does. Returns the usable
  /// lanes; throws Error(lane_unavailable) when there is none, and the peer is then failed; Error(version_mismatch) for
  /// a dialect that this core does not speak.
  std::vector<transport::Lane> attach_source(std::uint64_t peer, int fd, std::uint8_t dialect, Epoch epoch,
                                             std::string name, std::shared_ptr<const plan::Template> geometry,
                                             std::shared_ptr<const plan::Conversion> conversion, SourceFacts facts,
                                             const std::vector<transport::Lane>& wanted);
  /// A peer that dialled us. Takes `fd` over. Throws Error(version_mismatch).
  std::uint64_t attach_claimant(int fd, std::uint8_t dialect, Epoch epoch, std::string name, std::string address,
                                std::shared_ptr<const plan::Template> geometry, std::vector<std::byte> ucx_address,
                                bool same_host);
  /// Ends the connection; what lives on it fails with `failure`.
  void fail_peer(std::uint64_t peer, Failure failure);
  [[nodiscard]] std::vector<PeerReport> peers();
  /// Whether the connection, or the attempt at one, is over. Costs a lookup.
  [[nodiscard]] bool is_peer_lost(std::uint64_t peer) const;

  [[nodiscard]] std::shared_ptr<Handoff> offer(OfferOptions options);
  [[nodiscard]] std::shared_ptr<Handoff> pull(PullOptions options);
  [[nodiscard]] std::shared_ptr<Handoff> reserve(ReserveOptions options);
  [[nodiscard]] Pushed push(PushOptions options);
  /// The claimant that has reserved is connected.
  void start_push(const Pushed& push, std::uint64_t peer);
  /// Something was said to the push's state: the target is told.
  void tell_ready(const std::shared_ptr<Handoff>& handle);
  void cancel(const std::shared_ptr<Handoff>& handle);
  /// As if its owner had cancelled it, but for `why`.
  void fail(const std::shared_ptr<Handoff>& handle, Failure why);

  /// For tests: transfers that start from now on go wrong by this script; without one, right again. Returns what is
  /// counted of it.
  std::shared_ptr<const transport::FaultCounts> inject_faults(const std::optional<transport::FaultScript>& script);

  [[nodiscard]] Holds::Count holds() const { return services_.holds->count(); }
  [[nodiscard]] const Counters& counters() const noexcept { return services_.counters; }

 private:
  // What the poller's events are for; a peer's number is its own token.
  static constexpr std::uint64_t kWakerToken = 0;
  static constexpr std::uint64_t kUcxToken = 1;
  static constexpr std::uint64_t kFirstPeer = 16;

  void post(std::function<void()> task);
  [[nodiscard]] PeerPtr new_peer(PeerRole role, std::string address);
  void run() noexcept;
  [[nodiscard]] bool turn() noexcept;
  [[nodiscard]] bool run_tasks();
  void sleep_or_spin(bool busy);
  [[nodiscard]] std::int64_t sleep_ns(std::int64_t now) noexcept;
  void serve(const PeerPtr& peer);
  void dispatch(const PeerPtr& peer, const Header& header, std::span<const std::byte> body);
  void on_claim(const PeerPtr& from, const AttemptId& attempt, const Claim& claim);
  void lose(const PeerPtr& peer, Failure failure);
  bool drop_lost();
  void flush_channels();
  [[nodiscard]] PeerPtr peer(std::uint64_t id) const;
  [[nodiscard]] PeerPtr peer_or_lost(std::uint64_t id) const;
  void connect(const PeerPtr& peer, int fd);
  void admit_one();
  [[nodiscard]] std::shared_ptr<PullRequest> hold_for_pull(BlockTables blocks, std::uint64_t skip_tokens,
                                                           std::uint64_t num_tokens, std::int64_t deadline_ns);
  void let_go(const PullRequest& request) noexcept;
  void check_taking() const;
  void finish_thread();

  Services services_;
  std::vector<std::unique_ptr<transport::ucx::MemoryRegion>> registrations_;
  OfferBook offers_;
  PullBook pulls_;
  const std::uint32_t max_handoffs_;
  const std::int64_t lease_cap_ms_;
  const std::uint64_t max_quarantined_blocks_;
  std::atomic<std::uint64_t> next_sequence_{1};
  std::atomic<std::uint32_t> next_attempt_{1};
  std::atomic<std::uint64_t> next_peer_;

  mutable std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;  // guarded by mutex_
  std::unordered_set<std::uint64_t> alive_;   // guarded by mutex_: peers that are not lost
  std::optional<Failure> closed_;             // guarded by mutex_: no more tasks, and why
  std::optional<Failure> refusing_;           // guarded by mutex_: why nothing new is taken
  std::mutex close_mutex_;                    // one close at a time

  // Progress thread only, from here on.
  transport::Poller poller_;
  std::map<std::uint64_t, PeerPtr> peers_;
  std::deque<PeerPtr> lost_;  // the latest, so that a pull that comes too late can say of whom; bounded
  std::int64_t busy_until_ns_{0};
  std::int64_t drain_until_ns_{0};          // not 0: closing
  std::optional<Failure> refusing_claims_;  // as refusing_
  bool stop_{false};
  std::thread thread_;
};

}  // namespace kvlink::handoff
