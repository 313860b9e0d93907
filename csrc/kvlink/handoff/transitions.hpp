// Every transition of a handoff, of both sides, in one table. The books run from it; tests/model/generate.py reads this
// text for docs/STATES.md and for the Promela model that `make model-check` explores.
//
// A row reads: this machine, at one of these states, on one of these events, if all of these hold, goes to that state
// and then does these things, in order. Of the rows for a state and an event the first whose guards hold is taken; if
// there is none, nothing happens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace kvlink::handoff {

enum class Machine : std::uint8_t {
  offer,  // source: blocks that others may read
  grant,  // source: one attempt of one reader
  pull,   // target: one request, over one or several sources
  part,   // target: what one source delivers for a pull
};

/// States. `none`: not there, or not there any more.
enum class At : std::uint8_t {
  none,
  same,  // only where a row goes to: it stays where it is
  // offer
  offered,
  granted,  // somebody reads, or has read; of a grant: may read
  ended,
  // grant
  parked,
  sending,  // staged lane: granted, and the source sends
  summing,  // granted, and the source sums its blocks; or has, and waits for CONFIRM
  // pull
  open,
  stopping,  // the outcome is known, and the parts are told to stop
  draining,  // the outcome is out; of a part: told to stop, and may still write
  released,
  // part
  reserved,  // of a reservation that nobody has pushed to yet
  connecting,
  claiming,
  filling,  // pushed to: nothing moves, until the source says that more is ready
  planning,
  waiting,
  moving,
  checking,    // everything has arrived; until both sides have summed it
  converting,  // everything has arrived; until it is in the target's dtype and blocks
  moved,
  confirming,  // of a pull: every part is
  valid,
};

enum class On : std::uint8_t {
  // The owner calls, or a time is up.
  offer,
  submit,
  cancel,  // of a grant: the reader sends CANCEL
  close,
  expire,
  told,  // of a grant: the owner of a push says that more is ready
  deadline,
  lapse,
  // A reader sends.
  claim,
  check,  // integrity: sum what I claimed
  fetch,
  confirm,  // of a part: every part of its pull has moved
  renew,
  decline,  // a push
  // A source sends.
  push,
  piece,  // READY: some layers, for some tokens
  commit,
  grant,
  refuse,
  sums,
  valid,
  // A connection is there, or gone.
  ready,
  peer_lost,
  // A part goes on.
  planned,
  admit,
  turn,
  look,  // for what is ready and has not moved
  threads_gone,
  summed,  // some of the sums of a grant can be sent
  // One machine tells another of its side.
  opened,
  read,
  dropped,
  over,
  moved,
  fail,
  stop,
  stopped,
  gone,
};

/// Guards. The books evaluate them in `guards_of`.
enum class If : std::uint8_t {
  known,            // a live offer has the id, epoch and all
  unseen,           // no offer has or had the id
  may_park,         // the id is a mint's, unseen, and there is room: its offer may be on its way
  tokens_fit,       // no more tokens are claimed than are offered
  invited,          // the offer is for anybody, or a push to this peer
  reader_left,      // fewer readers have a grant or VALID than the offer is for
  same_peer,        // by the connection, which belongs to one life of either side
  same_attempt,     // by the number of the try
  pushed,           // the source has begun it
  committed,        // a push whose owner has committed it, or no push
  unsummed,         // no sums were asked for under the grant
  last_reader,      // all readers have VALID
  no_grants,        // no grant of the offer lives
  lease_lives,      // by the source's clock
  within_cap,       // what is asked for ends before the offer's cap
  push_fits,        // the tokens are those that were reserved, and the connection is for all that comes from the source
  piece_fits,       // it is of the request, no part of it was ready before, and there was no COMMIT
  covered,          // all of the request is ready, and there was no COMMIT
  has_pieces,       // something is ready and has not moved
  complete,         // after COMMIT, once all has moved
  lane_fits,        // the lane that is required leads to the source
  has_bytes,        // the source delivers something
  drained,          // no thread, operation or chunk of the part touches blocks
  all_arrived,      // the transfer has drained, and brought every byte of the plan
  sums,             // the grant is one with integrity
  sums_here,        // both sides have summed everything, and the target has all of it
  converts,         // elements come in another dtype than the target keeps
  converted,        // all of them are in the target's blocks, and nothing writes those any more
  all_parts_moved,  // of the pull
  all_parts_sound,  // no sum of any part differs between the two sides
  all_parts_valid,
  all_parts_gone,
};

enum class Do : std::uint8_t {
  // offer
  start_lease,
  wake_parked,
  end_grants,
  succeed,
  fail,
  free_shared,
  extend_lease,
  extend_to_cap,
  shorten_lease,
  // grant
  claim_again,
  send_grant,
  send_ready,
  send_valid,
  send_refuse,
  count_refused,
  count_reader,
  start_sender,
  start_sums,
  send_sums,
  stop_sender,
  tell_opened,
  tell_renew,
  tell_read,
  tell_dropped,
  // pull
  ask_parts,
  confirm_parts,
  stop_parts,
  note_success,
  note_failure,
  quarantine,
  note_corruption,
  free_exclusive,
  // part
  adopt_source,
  send_decline,
  open_pieces,
  take_piece,
  take_commit,
  plan_whole,
  look_on,
  send_claim,
  send_check,
  send_confirm,
  send_cancel,
  make_plan,
  queue,
  start_transfer,
  cancel_transfer,
  sum_blocks,
  take_sums,
  convert_blocks,
  start_renewing,
  stop_renewing,
  count_valid,
  tell_moved,
  tell_valid,
  tell_fail,
  tell_gone,
  // either side
  count_stale,
  settle,
  release,
};

/// Some values of an enum.
template <class Each>
class Set {
 public:
  constexpr Set() noexcept = default;
  constexpr Set(Each only) noexcept { put(only); }  // NOLINT: a row names one state or several
  constexpr Set(std::initializer_list<Each> values) noexcept {
    for (const Each value : values) put(value);
  }
  constexpr void put(Each value, bool in = true) noexcept { bits_ = in ? bits_ | bit(value) : bits_ & ~bit(value); }
  [[nodiscard]] constexpr bool has(Each value) const noexcept { return (bits_ & bit(value)) != 0; }
  [[nodiscard]] constexpr bool is_within(Set other) const noexcept { return (bits_ & ~other.bits_) == 0; }

 private:
  [[nodiscard]] static constexpr std::uint64_t bit(Each value) noexcept {
    return std::uint64_t{1} << static_cast<unsigned>(value);
  }
  std::uint64_t bits_{0};
};

/// What a row does, in order.
class Actions {
 public:
  constexpr Actions(std::initializer_list<Do> actions) {
    for (const Do action : actions) actions_[count_++] = action;  // One too many is no constant expression.
  }
  [[nodiscard]] constexpr const Do* begin() const noexcept { return actions_; }
  [[nodiscard]] constexpr const Do* end() const noexcept { return actions_ + count_; }

 private:
  Do actions_[6]{};
  std::size_t count_{0};
};

struct Row {
  Machine machine;
  Set<At> from;
  Set<On> events;
  Set<If> guards;
  At to;
  Actions actions;
};

/// Nothing happens at this state on this event. Otherwise the row to take.
[[nodiscard]] constexpr const Row* find_row(std::span<const Row> table, Machine machine, At from, On event,
                                            Set<If> holding) noexcept {
  for (const Row& row : table) {
    if (row.machine != machine || !row.from.has(from) || !row.events.has(event)) continue;
    if (row.guards.is_within(holding)) return &row;
  }
  return nullptr;
}

/// States of a part.
inline constexpr Set<At> kUnfinished{At::connecting, At::claiming, At::filling,    At::planning, At::waiting,
                                     At::moving,     At::checking, At::converting, At::moved,    At::confirming};
inline constexpr Set<At> kLive{At::connecting, At::claiming,   At::filling, At::planning,   At::waiting, At::moving,
                               At::checking,   At::converting, At::moved,   At::confirming, At::valid};
inline constexpr Set<At> kAnywhere{At::none,     At::reserved,   At::connecting, At::claiming, At::filling,
                                   At::planning, At::waiting,    At::moving,     At::checking, At::converting,
                                   At::moved,    At::confirming, At::valid,      At::draining};
/// Those in which its copies, sums or conversion want turns.
inline constexpr Set<At> kTurning{At::moving, At::checking, At::converting, At::draining};
/// States of a grant.
inline constexpr Set<At> kReading{At::granted, At::summing, At::sending};
inline constexpr Set<At> kReadingOrNot{At::none, At::granted, At::summing, At::sending};

// clang-format off
inline constexpr Row kTransitions[] = {
    // An id is offered once: a second offer would show other bytes under the same ticket.
    {Machine::offer, At::none, On::offer, {If::unseen}, At::offered, {Do::start_lease, Do::wake_parked}},
    {Machine::offer, At::none, On::offer, {}, At::ended, {Do::free_shared, Do::settle, Do::release}},
    {Machine::offer, {At::offered, At::granted}, On::opened, {}, At::granted, {}},
    {Machine::offer, At::granted, On::read,
     {If::last_reader}, At::ended, {Do::succeed, Do::free_shared, Do::settle, Do::release}},
    // A push has one reader, and ends with that one's attempt.
    {Machine::offer, At::granted, On::dropped,
     {If::pushed}, At::ended, {Do::fail, Do::free_shared, Do::settle, Do::release}},
    {Machine::offer, At::offered, {On::decline, On::peer_lost},
     {If::same_peer}, At::ended, {Do::fail, Do::free_shared, Do::settle, Do::release}},
    // One whose readers are all gone, by CANCEL or with their connections, can be claimed again until its lease ends, or
    // for as long as its owner waits for that.
    {Machine::offer, At::granted, On::dropped, {If::no_grants}, At::offered, {Do::shorten_lease}},
    // Counted from receipt. Never past the cap, so that a reader cannot keep blocks for good.
    {Machine::offer, At::granted, On::renew, {If::lease_lives, If::within_cap}, At::same, {Do::extend_lease}},
    {Machine::offer, At::granted, On::renew, {If::lease_lives}, At::same, {Do::extend_to_cap}},
    {Machine::offer, At::granted, On::renew, {}, At::same, {Do::count_stale}},
    // Released together with the outcome: from here on no CONFIRM is answered with VALID (I3).
    {Machine::offer, {At::offered, At::granted}, {On::expire, On::cancel, On::close},
     {}, At::ended, {Do::end_grants, Do::fail, Do::free_shared, Do::settle, Do::release}},

    {Machine::grant, At::none, On::claim,
     {If::known, If::invited, If::tokens_fit, If::reader_left}, At::granted,
     {Do::tell_opened, Do::send_grant, Do::send_ready}},
    {Machine::grant, kReading, On::told, {}, At::same, {Do::send_ready}},
    {Machine::grant, At::none, On::claim, {If::may_park}, At::parked, {}},
    {Machine::grant, kReadingOrNot, On::claim,
     {}, At::same, {Do::count_refused, Do::send_refuse}},
    {Machine::grant, At::parked, On::opened, {}, At::none, {Do::claim_again}},
    {Machine::grant, At::parked, On::lapse, {}, At::none, {Do::count_refused, Do::send_refuse}},
    {Machine::grant, At::parked, On::cancel, {If::same_peer, If::same_attempt}, At::none, {}},
    {Machine::grant, At::parked, On::peer_lost, {If::same_peer}, At::none, {}},
    // While the bytes of a pull move, or after those of a push: the source reads its blocks once more, on its copy
    // threads.
    {Machine::grant, At::granted, On::check,
     {If::same_peer, If::same_attempt, If::sums}, At::summing, {Do::start_sums}},
    {Machine::grant, At::sending, On::check,
     {If::same_peer, If::same_attempt, If::sums, If::unsummed}, At::same, {Do::start_sums}},
    {Machine::grant, kReadingOrNot, On::check, {}, At::same, {Do::count_stale}},
    // Sums are sent only while the grant lives, so what they are of is what was offered. Gone, nobody asks for them.
    {Machine::grant, {At::summing, At::sending}, On::summed,
     {If::same_peer, If::same_attempt}, At::same, {Do::send_sums}},
    {Machine::grant, {At::granted, At::summing}, On::fetch,
     {If::same_peer, If::same_attempt}, At::sending, {Do::start_sender}},
    {Machine::grant, At::sending, On::fetch,
     {If::same_peer, If::same_attempt, If::pushed}, At::same, {Do::start_sender}},
    {Machine::grant, kReadingOrNot, On::fetch, {}, At::same, {Do::count_stale}},
    {Machine::grant, kReading, On::renew,
     {If::same_peer, If::same_attempt}, At::same, {Do::tell_renew}},
    {Machine::grant, kReadingOrNot, On::renew, {}, At::same, {Do::count_stale}},
    // Before COMMIT the owner of a push may still be writing what is read.
    {Machine::grant, kReading, On::confirm,
     {If::same_peer, If::same_attempt, If::committed}, At::none, {Do::count_reader, Do::send_valid, Do::stop_sender, Do::tell_read}},
    // The grant lapsed while its bytes were on their way: what was read may be anything (P1).
    {Machine::grant, kReadingOrNot, On::confirm,
     {}, At::same, {Do::count_stale, Do::send_refuse}},
    {Machine::grant, kReading, On::cancel,
     {If::same_peer, If::same_attempt}, At::none, {Do::stop_sender, Do::tell_dropped}},
    {Machine::grant, kReading, On::peer_lost,
     {If::same_peer}, At::none, {Do::stop_sender, Do::tell_dropped}},
    {Machine::grant, kReading, On::over, {}, At::none, {Do::stop_sender, Do::send_refuse}},

    {Machine::pull, At::none, On::submit, {}, At::open, {Do::ask_parts}},
    // All sources are asked at once, at the end: none may count this reader while another can still fail.
    {Machine::pull, At::open, On::moved,
     {If::all_parts_moved, If::all_parts_sound}, At::confirming, {Do::confirm_parts}},
    // Only now, so that it names exactly what is wrong, of all sources.
    {Machine::pull, At::open, On::moved, {If::all_parts_moved}, At::stopping, {Do::note_corruption, Do::stop_parts}},
    {Machine::pull, At::confirming, On::valid, {If::all_parts_valid}, At::stopping, {Do::note_success, Do::stop_parts}},
    {Machine::pull, {At::open, At::confirming}, {On::fail, On::cancel, On::deadline, On::close},
     {}, At::stopping, {Do::note_failure, Do::stop_parts}},
    // Blocks are freed before the outcome is told, so that who sees it sees them free too, if they are (I2, I6).
    {Machine::pull, At::stopping, On::stopped,
     {If::all_parts_gone}, At::released, {Do::free_exclusive, Do::settle, Do::release}},
    // Until the transfers themselves say that they have drained, or have ended with the node: no timer ends it.
    {Machine::pull, At::stopping, On::stopped, {}, At::draining, {Do::quarantine, Do::settle}},
    {Machine::pull, At::draining, On::gone, {If::all_parts_gone}, At::released, {Do::free_exclusive, Do::release}},

    {Machine::part, At::reserved, On::push,
     {If::push_fits, If::lane_fits}, At::claiming, {Do::adopt_source, Do::send_claim}},
    // One push to a reservation: another one, or one that does not fit, is told so and changes nothing.
    {Machine::part, kAnywhere, On::push, {}, At::same, {Do::send_decline}},
    {Machine::part, At::connecting, On::ready, {If::lane_fits}, At::claiming, {Do::send_claim}},
    {Machine::part, At::connecting, On::ready, {}, At::same, {Do::tell_fail}},
    {Machine::part, At::claiming, On::grant,
     {If::same_peer, If::pushed}, At::filling, {Do::start_renewing, Do::open_pieces}},
    {Machine::part, At::claiming, On::grant, {If::same_peer}, At::planning, {Do::start_renewing, Do::make_plan}},
    {Machine::part, At::planning, On::planned, {If::has_bytes}, At::waiting, {Do::queue}},
    {Machine::part, At::planning, On::planned, {}, At::moved, {Do::tell_moved}},
    // Piece by piece. Those that become ready while one moves go together, as far as they can.
    {Machine::part, {At::filling, At::waiting, At::moving}, On::piece,
     {If::same_peer, If::piece_fits}, At::same, {Do::take_piece, Do::look_on}},
    // What is converted comes as a whole, like a pull: scratch memory and its sums are of a request.
    {Machine::part, At::filling, On::commit,
     {If::same_peer, If::covered, If::converts}, At::planning, {Do::take_commit, Do::plan_whole}},
    {Machine::part, {At::filling, At::waiting, At::moving}, On::commit,
     {If::same_peer, If::covered}, At::same, {Do::take_commit, Do::look_on}},
    {Machine::part, At::filling, On::look, {If::has_pieces}, At::waiting, {Do::queue}},
    {Machine::part, At::filling, On::look,
     {If::complete, If::sums}, At::checking, {Do::send_check, Do::sum_blocks}},
    {Machine::part, At::filling, On::look, {If::complete}, At::moved, {Do::tell_moved}},
    {Machine::part, At::waiting, On::admit, {If::pushed}, At::moving, {Do::start_transfer}},
    {Machine::part, At::moving, On::turn, {If::all_arrived, If::pushed}, At::filling, {Do::look_on}},
    {Machine::part, At::waiting, On::admit, {If::sums}, At::moving, {Do::send_check, Do::start_transfer}},
    {Machine::part, At::waiting, On::admit, {}, At::moving, {Do::start_transfer}},
    {Machine::part, At::moving, On::turn, {If::all_arrived, If::sums}, At::checking, {Do::sum_blocks}},
    {Machine::part, At::moving, On::turn, {If::all_arrived, If::converts}, At::converting, {Do::convert_blocks}},
    {Machine::part, At::moving, On::turn, {If::all_arrived}, At::moved, {Do::tell_moved}},
    {Machine::part, At::moving, On::turn, {If::drained}, At::moved, {Do::tell_fail}},
    {Machine::part, {At::moving, At::checking}, On::sums, {If::same_peer}, At::same, {Do::take_sums}},
    // Also what differs: cells with equal sums must be right, whatever becomes of the others.
    {Machine::part, At::checking, On::turn, {If::sums_here, If::converts}, At::converting, {Do::convert_blocks}},
    {Machine::part, At::checking, On::turn, {If::sums_here}, At::moved, {Do::tell_moved}},
    {Machine::part, At::converting, On::turn, {If::converted}, At::moved, {Do::tell_moved}},
    {Machine::part, At::moved, On::confirm, {}, At::confirming, {Do::send_confirm}},
    {Machine::part, At::confirming, On::valid,
     {If::same_peer}, At::valid, {Do::stop_renewing, Do::count_valid, Do::tell_valid}},
    // A source that grants twice or unasked, sums unasked, or says VALID without CONFIRM or twice, cannot be trusted.
    {Machine::part, kLive, On::grant, {If::same_peer}, At::same, {Do::tell_fail}},
    {Machine::part, kLive, On::valid, {If::same_peer}, At::same, {Do::tell_fail}},
    {Machine::part, kLive, On::sums, {If::same_peer}, At::same, {Do::tell_fail}},
    {Machine::part, kLive, On::refuse, {If::same_peer}, At::same, {Do::tell_fail}},
    // So it cannot if it says twice that something is ready, or commits what is not.
    {Machine::part, kLive, {On::piece, On::commit}, {If::same_peer}, At::same, {Do::tell_fail}},
    {Machine::part, kAnywhere, {On::grant, On::piece, On::commit, On::sums, On::refuse, On::valid}, {}, At::same, {Do::count_stale}},
    // A reservation that names its sources waits for nobody else.
    {Machine::part, At::reserved, On::peer_lost, {If::same_peer}, At::same, {Do::tell_fail}},
    // A part that is VALID does not need its source any more.
    {Machine::part, kUnfinished, On::peer_lost, {If::same_peer}, At::same, {Do::tell_fail}},
    {Machine::part, {At::reserved, At::connecting, At::valid}, On::stop, {}, At::none, {}},
    {Machine::part, {At::claiming, At::filling, At::planning, At::waiting, At::moved, At::confirming}, On::stop,
     {}, At::none, {Do::stop_renewing, Do::send_cancel}},
    {Machine::part, {At::moving, At::checking, At::converting}, On::stop,
     {}, At::draining, {Do::stop_renewing, Do::send_cancel, Do::cancel_transfer}},
    {Machine::part, At::draining, On::turn, {If::drained}, At::none, {Do::tell_gone}},
    {Machine::part, At::draining, On::threads_gone, {}, At::none, {Do::tell_gone}},
};
// clang-format on

}  // namespace kvlink::handoff
