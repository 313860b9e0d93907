// The source side: what this node offers, who reads it, and until when. Progress thread only, but for `add`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/handoff/handoff.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/messages.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/handoff/push_state.hpp"
#include "kvlink/handoff/retired_ids.hpp"
#include "kvlink/handoff/services.hpp"
#include "kvlink/handoff/transitions.hpp"
#include "kvlink/transport/integrity.hpp"
#include "kvlink/transport/summing.hpp"

namespace kvlink::handoff {

/// What `Engine::offer` was asked for, after it was checked and its blocks are held.
struct OfferRequest {
  std::shared_ptr<Handoff> handle;
  BlockTables blocks;  // one table a group, as `touched` leaves them
  std::uint64_t num_tokens{};
  std::int64_t expires_ns{};
  std::int64_t ttl_ms{};                   // what a renewal gives at most
  std::int64_t cap_ns{};                   // no renewal goes past it
  std::optional<std::int64_t> retry_ms{};  // what is left at most once all readers have gone
  std::uint32_t readers{1};
  transport::Integrity integrity{};  // offered to readers that demand none
  std::vector<std::byte> payload;
  // Of a push only.
  std::shared_ptr<PushState> push{};  // has the blocks, in place of `blocks`
  HandoffId reservation{};
  PeerPtr push_peer{};  // who has reserved, once it is connected: nobody else may claim the offer
};

class OfferBook {
 public:
  /// `table`: another one than the project's only in tests that look for rows that do not matter.
  explicit OfferBook(Services& services, std::span<const Row> table = kTransitions)
      : services_(services), table_(table), retired_(services.epoch) {}

  /// Any thread. The offer can be claimed as soon as this returns. One under an id that is or was offered here fails.
  void add(OfferRequest request);

  void on_claim(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim);
  void on_check(const PeerPtr& peer, const AttemptId& attempt, const Fetch& pieces);
  void on_fetch(const PeerPtr& peer, const AttemptId& attempt, const Fetch& fetch);
  void on_credit(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t chunks);
  void on_confirm(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t bytes);
  void on_cancel(const PeerPtr& peer, const AttemptId& attempt);
  void on_renew(const PeerPtr& peer, std::span<const Renewal> renewals, std::int64_t now);
  void on_peer_lost(const PeerPtr& peer);
  void on_decline(const PeerPtr& peer, const HandoffId& offer, const Refuse& decline);

  /// The node that a push is for is connected.
  void start_push(const HandoffId& id, const PeerPtr& peer);
  /// The same, where the push has ended before: that node claims it, is refused with the reason, and need not wait.
  static void call_off_push(const PeerPtr& peer, const HandoffId& reservation, const Push& push);
  /// The owner of a push has said something: see PushState.
  void tell_ready(const HandoffId& id);

  void cancel(const HandoffId& id, const Failure& failure);
  void close_all(const Failure& failure);

  /// Expires leases and drives staged senders. Returns whether anything happened.
  bool turn(std::int64_t now) noexcept;
  [[nodiscard]] std::int64_t next_deadline() noexcept;
  /// No staged sender and no sum reads this node's memory any more.
  [[nodiscard]] bool drained() const noexcept { return senders_.empty() && sums_.empty(); }
  /// After the threads that read have ended: lets go of what never drained by itself.
  void drop_senders() noexcept {
    senders_.clear();
    sums_.clear();
  }

  /// Whether a claim of it gets an answer now, and not only once its offer comes.
  [[nodiscard]] bool knows(const HandoffId& id);
  /// Refuses the claims that wait for their offers.
  void refuse_parked(const Failure& failure);

 private:
  /// The sums of what one grant's reader claimed, until they are sent.
  struct GrantSums {
    PeerPtr peer;
    AttemptId attempt;
    std::shared_ptr<transport::Summing> work;
    std::uint64_t sent_bytes{0};
    bool called_off{false};

    [[nodiscard]] bool over() const noexcept {
      return work->drained() && (called_off || !work->complete() || sent_bytes == work->sums().size());
    }
  };
  struct Grant {
    At at{At::none};
    PeerPtr peer;
    AttemptId attempt;
    Claim claim;
    transport::Integrity integrity{};
    std::shared_ptr<transport::StagedSender> sender{};  // staged lane only
    std::shared_ptr<GrantSums> sums{};                  // with integrity only
  };
  struct Offer {
    At at{At::none};
    OfferRequest request;
    std::uint32_t validated{0};
    std::uint32_t ranks{1};  // that one reader consists of, as the first claim says
    std::uint64_t bytes{0};
    std::string lane;
    std::list<Grant> grants;  // live ones

    /// How many claims end it.
    [[nodiscard]] std::uint64_t wanted() const noexcept { return std::uint64_t{request.readers} * ranks; }
    /// Nobody has claimed it, or all who have let go.
    [[nodiscard]] bool untouched() const noexcept { return validated == 0 && grants.empty(); }
    [[nodiscard]] bool has_room(const Claim& claim) const noexcept {
      return untouched() || (claim.ranks == ranks && validated + grants.size() < wanted());
    }
  };
  using Offers = std::map<HandoffId, Offer>;
  /// A claim that came before its offer, as it may where a scheduler mints the ids.
  struct Parked {
    PeerPtr peer;
    AttemptId attempt;
    Claim claim;
    std::int64_t until_ns{};
  };

  /// What an event brings along: what the message says, and whom it is from.
  struct News {
    PeerPtr peer{};
    AttemptId attempt{};
    std::optional<Claim> claim{};
    const Fetch* fetch{nullptr};  // of CHECK too
    GrantSums* sums{nullptr};
    std::uint64_t bytes{0};
    std::uint32_t lease_ms{0};
    std::int64_t now{0};
    std::optional<Failure> failure{};
  };

  // How the table is carried out: offer_steps.cpp.
  void step_offer(Offer& offer, On event, const News& news);
  /// `grant`: the one that the event is about, or the nearest to it; null: none.
  void step_grant(Offer* offer, Grant* grant, At from, On event, const News& news);
  [[nodiscard]] Set<If> guards_of(const Offer& offer, const News& news) const;
  [[nodiscard]] Set<If> guards_of(const Offer* offer, const Grant* grant, const News& news) const;
  void perform(Do action, Offer& offer, const News& news);
  void perform(Do action, Offer* offer, Grant* grant, const News& news);
  void send_grant(const Offer& offer, const Grant& grant);
  void send_refuse(const Offer* offer, const News& news);
  // Of pushes: push_offers.cpp.
  static void send_ready(const Offer& offer, const Grant& grant);
  /// `news` with what the end of its only grant means for a push.
  [[nodiscard]] static News end_of_push(const Offer& offer, const News& news);
  [[nodiscard]] static BlockTables blocks_of(const OfferRequest& request) {
    return request.push ? request.push->blocks() : request.blocks;
  }
  void start_sender(Offer& offer, Grant& grant, const News& news);
  void start_sums(Offer& offer, Grant& grant, const News& news);
  static void send_sums(const News& news);
  void give_up(Offer& offer, Grant& grant, const News& news, const Error& error);
  /// Of a grant whose bytes cannot be sent: the reader hears why, and need not wait for its deadline.
  void give_up(const transport::StagedSender& sender, const Failure& failure);
  /// Sends what the connection takes. Returns whether it sent anything.
  bool advance(GrantSums& sums);
  void extend_lease(Offer& offer, std::int64_t expires_ns);
  void set_lease(Offer& offer, std::int64_t expires_ns);
  void settle(Offer& offer, std::optional<Failure> failure);

  /// A message about a grant: of the offer that it names, the grant that it names, else any that lives.
  void on_message(On event, const News& news);
  [[nodiscard]] static Grant* nearest(Offer& offer, const News& news);
  [[nodiscard]] Offers::iterator find(const HandoffId& id);
  [[nodiscard]] bool unseen(const HandoffId& id) const {
    return !offers_.contains(id) && retired_.look_up(id) == Retirement::none;
  }
  [[nodiscard]] Failure why_unknown(const HandoffId& id) const;
  [[nodiscard]] Failure why_refused(const Offer* offer, const News& news) const;
  [[nodiscard]] std::deque<Parked> take_parked(const std::function<bool(const Parked&)>& test);
  void adopt_added();
  void adopt(OfferRequest request);
  void retire(const HandoffId& id, Code why);

  Services& services_;
  std::span<const Row> table_;
  std::mutex added_mutex_;
  std::vector<OfferRequest> added_;  // guarded by added_mutex_
  Offers offers_;
  std::set<std::pair<std::int64_t, HandoffId>> leases_;          // (expiry, id) of every offer
  RetiredIds retired_;                                           // which offers have ended; bounded and exact
  std::map<HandoffId, Code> reasons_;                            // why the latest of them did; bounded
  std::deque<HandoffId> reasons_order_;                          // oldest first
  std::deque<Parked> parked_;                                    // bounded
  std::list<std::shared_ptr<transport::StagedSender>> senders_;  // until drained, though the offer be gone
  std::list<std::shared_ptr<GrantSums>> sums_;                   // likewise
};

}  // namespace kvlink::handoff
