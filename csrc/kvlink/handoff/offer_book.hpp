// The source side: what this node offers, who reads it, and until when. Progress thread only, but for `add`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvlink/handoff/handoff.hpp"
#include "kvlink/handoff/holds.hpp"
#include "kvlink/handoff/messages.hpp"
#include "kvlink/handoff/peer.hpp"
#include "kvlink/handoff/services.hpp"

namespace kvlink::handoff {

/// What `Engine::offer` was asked for, after it was checked and its blocks are held.
struct OfferRequest {
  std::shared_ptr<Handoff> handle;
  BlockTables blocks;  // one table a group, as `touched` leaves them
  std::uint64_t num_tokens{};
  std::int64_t expires_ns{};
  std::uint32_t readers{1};
  std::vector<std::byte> payload;
};

class OfferBook {
 public:
  explicit OfferBook(Services& services) : services_(services) {}

  /// Any thread. The offer can be claimed as soon as this returns. One under an id that is or was offered here fails.
  void add(OfferRequest request);

  void on_claim(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim);
  void on_fetch(const PeerPtr& peer, const AttemptId& attempt, const Fetch& fetch);
  void on_credit(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t chunks);
  void on_confirm(const PeerPtr& peer, const AttemptId& attempt, std::uint64_t bytes);
  void on_cancel(const PeerPtr& peer, const AttemptId& attempt);
  void on_peer_lost(const PeerPtr& peer);

  void cancel(const HandoffId& id, const Failure& failure);
  void close_all(const Failure& failure);

  /// Expires leases and drives staged senders. Returns whether anything happened.
  bool turn(std::int64_t now) noexcept;
  [[nodiscard]] std::int64_t next_deadline() noexcept;
  /// No staged sender reads this node's memory any more.
  [[nodiscard]] bool drained() const noexcept { return senders_.empty(); }
  /// After the threads that read have ended: lets go of what never drained by itself.
  void drop_senders() noexcept { senders_.clear(); }

 private:
  struct Grant {
    PeerPtr peer;
    AttemptId attempt;
    Claim claim;
    bool fetched{false};
    std::shared_ptr<transport::StagedSender> sender;  // staged lane only
  };
  struct Offer {
    OfferRequest request;
    std::uint32_t validated{0};
    std::uint64_t bytes{0};
    std::string lane;
    std::vector<Grant> grants;  // live ones
  };
  using Offers = std::map<HandoffId, Offer>;
  /// A claim that came before its offer, as it may where a scheduler mints the ids.
  struct Parked {
    PeerPtr peer;
    AttemptId attempt;
    Claim claim;
    std::int64_t until_ns{};
  };

  [[nodiscard]] Offers::iterator find(const HandoffId& id);
  [[nodiscard]] Failure why_unknown(const HandoffId& id) const;
  [[nodiscard]] std::optional<Failure> why_refused(const Offer& offer, const Claim& claim) const;
  [[nodiscard]] Grant* find_grant(const PeerPtr& peer, const AttemptId& attempt);
  [[nodiscard]] bool park(const PeerPtr& peer, const AttemptId& attempt, const Claim& claim);
  [[nodiscard]] bool forget_parked(std::int64_t now);
  void adopt_added();
  void adopt(OfferRequest request);
  void remember(const HandoffId& id, Code why);
  void end_grant(Grant& grant) noexcept;
  void end(Offers::iterator offer, std::optional<Failure> failure);

  Services& services_;
  std::mutex added_mutex_;
  std::vector<OfferRequest> added_;  // guarded by added_mutex_
  Offers offers_;
  std::set<std::pair<std::int64_t, HandoffId>> leases_;          // (expiry, id) of every offer
  std::map<HandoffId, Code> retired_;                            // why the latest ended offers ended; bounded
  std::deque<HandoffId> retired_order_;                          // oldest first
  std::deque<Parked> parked_;                                    // bounded
  std::list<std::shared_ptr<transport::StagedSender>> senders_;  // until drained, though the offer be gone
};

}  // namespace kvlink::handoff
