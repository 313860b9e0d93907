/* The world around the table of transitions: two targets with two attempts each (slots 0 and 1 are of target 0, slots 2
   and 3 of target 1), one source with one offer of two blocks, and a network that is a bag of messages. rows.pml has the
   rows; here stands what their guards ask for and their actions do.

   READERS    readers of the offer
   STARTS     attempts in all
   LIVES      1: the source may crash once and start again under a new epoch
   DEATHS     1: target 0 may crash once and start again
   RENEWALS   1: readers renew their lease, once each
   AGAIN      1: the owner offers the same id again after the offer ended
   WIDE       1: a claim of slot 2 may ask for more than is offered
   CHECKS     1: with integrity. Two versions have equal sums if they are one
   PUSHES     1: the targets reserve, and the offer is a push into one of the reservations. Its owner computes one block
              after another, in any order, says that each is ready, and commits in the end
   CONVERTS   1: the source's elements are converted
   NAMED      1: a reservation is for the life of the source that there is when it is made

   Versions: blocks that hold what epoch e offered have version 1 + e. Version 0 is anything else. */

#define NO 255
#define CLAIM 1
#define CONFIRM 2
#define CANCEL 4
#define RENEW 8
#define GRANT 16
#define REFUSE 32
#define VALID 64
#define CHECK 128
#define SUMS 256
#define PUSH 512
#define DECLINE 1024
#define READY0 2048      /* the first block is ready */
#define READY1 4096
#define COMMIT 8192

/* By slot. */
byte at_grant[4], at_part[4], at_pull[4];
short net[4];            /* the bag: messages of this attempt on their way, either direction */
bool started[4], dead[4];
bool life[4];            /* the target's life; its numbers of attempts begin anew with each */
bool seen_source[4];     /* the source's life that the connection leads to */
bool number[4];          /* of the attempt */
bool ticket[4];          /* the epoch that the ticket names */
bool wide[4], renewed[4];
byte copier[4];          /* 0 none, 1 and 2 before the first and the second block, 3 done, 4 failed or stopped */
byte read0[4], read1[4]; /* the versions that were copied */
byte summer[4];          /* at the source: 0 none, 1 and 2 before the first and the second block, 3 done */
byte sum0[4], sum1[4];   /* the versions that were summed there */
bool has_sums[4];        /* they have come */
byte converter[4];       /* 0 none, 1 at work, 2 done */
bool held[4], outcome[4], released[4];

/* Ghosts: what really happened, for the assertions only. */
bool asked[4], gave_up[4], was_granted[4], was_refused[4], was_answered[4];

/* Of a push: at the target, by slot, blocks as bits. */
byte taken[4];           /* READY has come */
byte pending[4];         /* of them, those that have not begun to move */
byte only[4];            /* those that move */
bool committed[4];       /* COMMIT has come */
bool push_from[4];       /* the source's life that pushed last */

/* And at the source. */
byte pushed_to = NO;     /* the slot whose reservation it names */
bool push_life;          /* the target's life that it is connected to */
byte computed, said, told;
bool owner_committed, told_commit;
hidden byte piece;

/* The source. */
byte at_offer, validated, content;
bool epoch, seen, again;
bool offer_held, offer_outcome, offer_released;
bool target_life;        /* of target 0 */
bool death_unnoticed;    /* by the source */
bool crash_unnoticed[2]; /* by the targets */
byte starts;

/* What the current step is about: the sender, the grant and the part. */
hidden byte m, g, p, i, by_peer, from_target, from_life, from_source;

#define READS(s) (at_grant[s] == AT_granted || at_grant[s] == AT_summing)
#define GRANTS (READS(0) + READS(1) + READS(2) + READS(3))
#define OFFER_LIVES (at_offer == AT_offered || at_offer == AT_granted)

#define OFFER_AT at_offer
#define GRANT_AT (g == NO -> AT_none : at_grant[g])
#define PULL_AT at_pull[p]
#define PART_AT (p == NO -> AT_none : at_part[p])

#define IF_offer_unseen (!seen)
#define IF_offer_last_reader (validated >= READERS)
#define IF_offer_no_grants (GRANTS == 0)
#define IF_offer_lease_lives true
#define IF_offer_within_cap true
#define IF_grant_known (OFFER_LIVES && ticket[m] == epoch)
#define IF_grant_may_park (ticket[m] == epoch && !seen)
#define IF_grant_tokens_fit (!wide[m])
#define IF_grant_reader_left (validated + GRANTS < READERS)
#define IF_grant_same_peer (g / 2 == from_target && life[g] == from_life && seen_source[g] == from_source)
#define IF_grant_same_attempt (number[g] == number[m])
#define IF_grant_sums CHECKS
#define IF_grant_unsummed true
#define IF_offer_pushed PUSHES
#define IF_offer_same_peer (pushed_to == m && push_life == from_life && epoch == from_source)
#define IF_grant_invited (!PUSHES || (pushed_to == m && push_life == from_life && epoch == from_source))
#define IF_grant_pushed PUSHES
#define IF_grant_committed (!PUSHES || told_commit)
#define IF_part_pushed (PUSHES && !(CONVERTS && committed[p]))
#define IF_part_push_fits (!NAMED || push_from[p] == seen_source[p])
/* The source here is honest, see DO_part_take_piece. */
#define IF_part_piece_fits true
#define IF_part_covered true
#define IF_part_has_pieces (pending[p] != 0)
#define IF_part_complete (committed[p] && pending[p] == 0)
#define IF_part_sums CHECKS
#define IF_part_sums_here has_sums[p]
#define IF_part_converts CONVERTS
#define IF_part_converted (converter[p] == 2)
#define IF_part_same_peer (life[p] == from_life && seen_source[p] == from_source && \
                           (NAMED || at_part[p] != AT_reserved))
#define IF_part_lane_fits true
#define IF_part_has_bytes true
#define IF_part_drained ((copier[p] == 0 || copier[p] >= 3) && converter[p] != 1)
#define IF_part_all_arrived (copier[p] == 3)
/* A pull has one source here: all of its parts have moved when one has. */
#define IF_pull_all_parts_moved true
#define IF_pull_all_parts_valid true
#define IF_pull_all_parts_sound (!CHECKS || (read0[p] == sum0[p] && read1[p] == sum1[p]))
#define IF_pull_all_parts_gone (at_part[p] == AT_none)

#define GO_offer(to) at_offer = to
#define GO_pull(to) at_pull[p] = to

/* Who may still take a message to slot `s`: itself, or an attempt of the target's next life under the same number. The
   others are not kept, nor is what nothing asks for any more: both would only multiply states. */
#define LISTENS(s) (at_part[s] != AT_none || (DEATHS && s == 0 && !outcome[1]))

#include "rows.pml"

inline GO_grant(to) {
  if
  :: (to == AT_granted || to == AT_parked) ->
     /* P5: no claim waits for an offer that is over. */
     assert(to == AT_granted || !seen);
     g = m
  :: else ->
     /* P8: nobody loses a grant by what another does. */
     assert(!by_peer || gave_up[g] || dead[g])
  fi;
  at_grant[g] = to
}

inline GO_part(to) {
  at_part[p] = to;
  if
  :: to == AT_filling && copier[p] == 3 -> copier[p] = 0
  :: else
  fi;
  if
  :: to == AT_none ->
     was_granted[p] = false; was_refused[p] = false; was_answered[p] = false;
     if :: !LISTENS(p) -> net[p] = net[p] & (CLAIM | CHECK | CONFIRM | CANCEL | RENEW | PUSH | DECLINE) :: else fi;
     if :: IF_part_drained -> copier[p] = 0; converter[p] = 0 :: else fi
  :: else
  fi
}

inline to_target(s, message) { if :: LISTENS(s) -> net[s] = net[s] | message :: else fi }

inline DO_offer_start_lease() {
  content = (again -> 3 : 1 + epoch); computed = (PUSHES -> 0 : 3); offer_held = true; seen = true
}
inline DO_offer_wake_parked() {
  i = 0;
  do
  :: i < 4 ->
     if
     :: at_grant[i] == AT_parked -> g = i; m = i; by_peer = 0; grant_opened()
     :: else
     fi;
     i++
  :: else -> break
  od
}
inline DO_offer_end_grants() {
  i = 0;
  do
  :: i < 4 ->
     if
     :: READS(i) -> g = i; m = i; by_peer = 0; grant_over()
     :: else
     fi;
     i++
  :: else -> break
  od
}
/* P4: success means that every reader was answered. */
inline DO_offer_succeed() { assert(validated == READERS) }
inline DO_offer_fail() { skip }
inline DO_offer_free_shared() { assert(again || offer_held); offer_held = false }
inline DO_offer_settle() { assert(again || !offer_outcome); offer_outcome = true }
inline DO_offer_release() { assert(again || (offer_outcome && !offer_released && !offer_held)); offer_released = true }
inline DO_offer_extend_lease() { skip }
inline DO_offer_extend_to_cap() { skip }
inline DO_offer_shorten_lease() { skip }
inline DO_offer_count_stale() { skip }

inline DO_grant_claim_again() { net[m] = net[m] | CLAIM }
inline DO_grant_send_grant() { to_target(m, GRANT); was_granted[m] = (at_part[m] != AT_none) }
/* What the owner has said, and the target was not told. COMMIT comes behind all of it. */
inline DO_grant_send_ready() {
  if :: (said & ~told & 1) -> to_target(g, READY0) :: else fi;
  if :: (said & ~told & 2) -> to_target(g, READY1) :: else fi;
  told = said;
  if :: owner_committed && !told_commit -> told_commit = true; to_target(g, COMMIT) :: else fi
}
inline DO_grant_send_refuse() { to_target(m, REFUSE); was_refused[m] = (at_part[m] != AT_none) }
inline DO_grant_count_refused() { skip }
/* P4: a reader counts because it has asked, not because another has. */
inline DO_grant_count_reader() { assert(asked[g]); validated++ }
inline DO_grant_send_valid() { to_target(m, VALID); was_answered[m] = (at_part[m] != AT_none) }
inline DO_grant_count_stale() { skip }
inline DO_grant_start_sender() { skip }
inline DO_grant_start_sums() { summer[g] = 1 }
/* Sums are for who holds a grant. */
inline DO_grant_send_sums() { assert(READS(m)); to_target(m, SUMS) }
inline DO_grant_stop_sender() { skip }
inline DO_grant_tell_opened() { offer_opened() }
/* A lease is renewed for who holds a grant. */
inline DO_grant_tell_renew() { assert(READS(m)); offer_renew() }
inline DO_grant_tell_read() { offer_read() }
inline DO_grant_tell_dropped() { offer_dropped() }

inline DO_pull_ask_parts() { at_part[p] = (PUSHES -> AT_reserved : AT_connecting); held[p] = true }
inline DO_pull_confirm_parts() { part_confirm() }
inline DO_pull_stop_parts() { part_stop(); pull_stopped() }
/* P1: what is called right was offered under this ticket, not reused while it was read, and is in the blocks. */
#define IN_BLOCKS (!CONVERTS || converter[p] == 2)
inline DO_pull_note_success() {
  assert(IN_BLOCKS && read0[p] == 1 + ticket[p] && read1[p] == 1 + ticket[p]); read0[p] = 0; read1[p] = 0
}
inline DO_pull_quarantine() { assert(held[p]) }
/* P1: so is what equal sums call right, though the rest is wrong. */
#define SOUND(read, sum) (read[p] != sum[p] || read[p] == 1 + ticket[p])
#define IS_CHECKED (CHECKS && copier[p] == 3 && (at_part[p] == AT_moved || at_part[p] == AT_confirming))
inline DO_pull_note_corruption() {
  assert(IN_BLOCKS && SOUND(read0, sum0) && SOUND(read1, sum1)); read0[p] = 0; read1[p] = 0
}
inline DO_pull_note_failure() {
  assert(!IS_CHECKED || (IN_BLOCKS && SOUND(read0, sum0) && SOUND(read1, sum1))); read0[p] = 0; read1[p] = 0
}
inline DO_pull_free_exclusive() { assert(held[p]); held[p] = false }
inline DO_pull_settle() { assert(!outcome[p]); outcome[p] = true }
inline DO_pull_release() { assert(outcome[p] && !released[p] && !held[p]); released[p] = true }

inline DO_part_send_claim() { net[p] = net[p] | CLAIM }
/* From now on it is about the offer of the life that pushed, over the connection to that. */
inline DO_part_adopt_source() { ticket[p] = push_from[p]; seen_source[p] = push_from[p] }
inline DO_part_send_decline() { net[m] = net[m] | DECLINE }
inline DO_part_open_pieces() { assert(was_granted[p]) }
inline DO_part_take_piece() {
  assert(!(taken[p] & piece) && !committed[p]); taken[p] = taken[p] | piece; pending[p] = pending[p] | piece
}
inline DO_part_take_commit() { assert(taken[p] == 3 && !committed[p]); committed[p] = true }
inline DO_part_look_on() { if :: at_part[p] == AT_filling && !CONVERTS -> part_look() :: else fi }
/* From here on like any pull. */
inline DO_part_plan_whole() { part_planned() }
inline DO_part_send_confirm() { net[p] = net[p] | CONFIRM; asked[p] = true }
inline DO_part_send_cancel() { net[p] = net[p] | CANCEL; gave_up[p] = true }
/* Acts only on what was sent to it. */
inline DO_part_make_plan() { assert(was_granted[p]); part_planned() }
inline DO_part_count_valid() { assert(was_answered[p]) }
inline DO_part_count_stale() { skip }
inline DO_part_queue() { skip }
inline DO_part_send_check() { net[p] = net[p] | CHECK }
inline DO_part_sum_blocks() { skip }
inline DO_part_take_sums() { has_sums[p] = true }
/* Only what has arrived, and only where it lies in memory of its own. */
inline DO_part_convert_blocks() { assert(CONVERTS && copier[p] == 3); converter[p] = 1 }
/* Of a push, one or both blocks: whatever is ready by now. What is converted comes as a whole. */
inline DO_part_start_transfer() {
  if
  :: PUSHES && !CONVERTS -> copier[p] = (pending[p] & 1 -> 1 : 2); only[p] = pending[p]; pending[p] = 0
  :: else -> copier[p] = 1; only[p] = 3
  fi
}
inline DO_part_cancel_transfer() { skip }
inline DO_part_start_renewing() { skip }
inline DO_part_stop_renewing() { skip }
inline DO_part_tell_moved() { pull_moved() }
inline DO_part_tell_valid() { pull_valid() }
/* P8: fails for a reason of its own. */
inline DO_part_tell_fail() { assert(was_refused[p] || seen_source[p] != epoch || copier[p] == 4); pull_fail() }
inline DO_part_tell_gone() { pull_gone() }

/* Whom a message of slot `s` is from. */
inline sent_by(s) { m = s; from_target = s / 2; from_life = life[s]; from_source = seen_source[s]; by_peer = 1 }

/* The grant that a message of `m` names, else another one of the same offer. */
inline find_grant() {
  g = NO;
  if
  :: ticket[m] != epoch
  :: else ->
     i = 0;
     do
     :: i < 4 -> if :: READS(i) -> g = i :: else fi; i++
     :: else -> break
     od;
     if :: READS(m) -> g = m :: else fi
  fi
}

/* The live part with the id and number of the message: of another life of the target, maybe. */
inline find_part() {
  p = NO; i = 2 * (m / 2);
  do
  :: i < 2 * (m / 2) + 2 ->
     if
     :: at_part[i] != AT_none && ticket[i] == ticket[m] && number[i] == number[m] && p != m -> p = i
     :: else
     fi;
     i++
  :: else -> break
  od
}

inline cancel_parked() {
  g = 0;
  do
  :: g < 4 -> if :: at_grant[g] == AT_parked && ticket[g] == ticket[m] -> grant_cancel() :: else fi; g++
  :: else -> break
  od
}

inline check() {
  assert(offer_held == OFFER_LIVES);
  assert(!(at_offer == AT_offered && GRANTS > 0))
}

inline start(s) {
  started[s] = true; starts++;
  seen_source[s] = epoch;
  if :: s < 2 -> life[s] = target_life :: else fi;
  if :: (s == 1 || s == 3) && !dead[s - 1] -> number[s] = 1 :: else fi;
  p = s; pull_submit()
}

/* The targets are alike, so the first to start is target 0, unless it is the one that crashes. */
#define MAY_START(s) (!started[s] && starts < STARTS && (!PUSHES || s < 2) && \
                      (s == 0 || (s == 2 && (started[0] || DEATHS)) || (s % 2 == 1 && (outcome[s - 1] || dead[s - 1]))))

/* The push's connection leads to the life that the target has now. */
#define PUSH_TO(s) push_from[s] = epoch; push_life = life[s]; net[s] = net[s] | PUSH
#define TOLD g = pushed_to; m = g; by_peer = 0; if :: g != NO -> if :: READS(g) -> grant_told() :: else fi :: else fi

active [4] proctype slot() {
  byte s = _pid;
end:
  do
  :: d_step { MAY_START(s) ->
       ticket[s] = epoch; start(s) }
  :: d_step { LIVES && !PUSHES && epoch && MAY_START(s) ->
       start(s) }  /* by a ticket of the source's life before */
  :: d_step { WIDE && s == 2 && MAY_START(s) -> wide[s] = true; ticket[s] = epoch; start(s) }
  :: d_step { at_part[s] == AT_connecting -> sent_by(s); p = s; part_ready() }
  :: d_step { (net[s] & PUSH) -> net[s] = net[s] & ~PUSH; m = s; p = (at_part[s] != AT_none -> s : NO);
       if :: !dead[s] -> part_push() :: else fi }
  :: d_step { (net[s] & DECLINE) -> net[s] = net[s] & ~DECLINE; sent_by(s); from_source = push_from[s];
       if :: push_from[s] == epoch && OFFER_LIVES -> offer_decline() :: else fi; check() }
  /* The connection keeps the order of what the source says. */
  :: d_step { (net[s] & READY0) && !(net[s] & GRANT) -> net[s] = net[s] & ~READY0; sent_by(s); piece = 1;
       find_part(); part_piece() }
  :: d_step { (net[s] & READY1) && !(net[s] & GRANT) -> net[s] = net[s] & ~READY1; sent_by(s); piece = 2;
       find_part(); part_piece() }
  :: d_step { (net[s] & COMMIT) && !(net[s] & (GRANT | READY0 | READY1)) -> net[s] = net[s] & ~COMMIT; sent_by(s);
       find_part(); part_commit() }
  :: d_step { at_part[s] == AT_waiting -> p = s; part_admit() }
  :: d_step { at_part[s] == AT_moving || at_part[s] == AT_draining || at_part[s] == AT_checking ||
              at_part[s] == AT_converting -> p = s; part_turn() }
  :: d_step { at_pull[s] == AT_open || at_pull[s] == AT_confirming -> p = s; pull_deadline() }
  :: d_step { at_pull[s] == AT_open || at_pull[s] == AT_confirming -> p = s; pull_cancel() }
  :: d_step { RENEWALS && at_part[s] == AT_moving && !renewed[s] -> renewed[s] = true; net[s] = net[s] | RENEW }
  :: d_step { at_grant[s] == AT_parked -> sent_by(s); g = s; by_peer = 0; grant_lapse() }
  /* The copier. It may be slow to stop; what it writes once the blocks are released would land in another request. */
  :: d_step { copier[s] == 1 -> assert(!released[s]);
       read0[s] = (ticket[s] == epoch && at_part[s] == AT_moving && (computed & 1) -> content : 0);
       copier[s] = (only[s] & 2 -> 2 : 3) }
  :: d_step { copier[s] == 2 -> assert(!released[s]);
       read1[s] = (ticket[s] == epoch && at_part[s] == AT_moving && !wide[s] && (computed & 2) -> content : 0);
       copier[s] = 3 }
  :: d_step { copier[s] == 1 || copier[s] == 2 -> copier[s] = 4 }
  /* So may the converter, which alone writes blocks where there is one. */
  :: d_step { converter[s] == 1 -> assert(!released[s]); converter[s] = 2 }
  /* The source's copy threads sum what lies in its blocks, whatever that is by now. */
  :: d_step { summer[s] == 1 -> sum0[s] = content; summer[s] = 2 }
  :: d_step { summer[s] == 2 -> sum1[s] = content; summer[s] = 3 }
  :: d_step { summer[s] == 3 -> summer[s] = 0; sent_by(s); by_peer = 0; find_grant(); grant_summed() }
  /* The network brings what it likes. */
  :: d_step { net[s] & CLAIM -> net[s] = net[s] & ~CLAIM; sent_by(s); g = (READS(m) -> m : NO);
       grant_claim(); check() }
  :: d_step { net[s] & CHECK -> net[s] = net[s] & ~CHECK; sent_by(s); find_grant(); by_peer = 0; grant_check() }
  :: d_step { net[s] & SUMS -> net[s] = net[s] & ~SUMS; sent_by(s); find_part(); part_sums() }
  :: d_step { net[s] & CONFIRM -> net[s] = net[s] & ~CONFIRM; sent_by(s); find_grant(); by_peer = 0; grant_confirm();
       check() }
  :: d_step { net[s] & CANCEL -> net[s] = net[s] & ~CANCEL; sent_by(s); cancel_parked();
       find_grant(); grant_cancel(); check() }
  :: d_step { net[s] & RENEW -> net[s] = net[s] & ~RENEW; sent_by(s); find_grant(); grant_renew() }
  :: d_step { net[s] & GRANT -> net[s] = net[s] & ~GRANT; sent_by(s); find_part(); part_grant() }
  :: d_step { net[s] & REFUSE -> net[s] = net[s] & ~REFUSE; sent_by(s); find_part(); part_refuse() }
  :: d_step { net[s] & VALID -> net[s] = net[s] & ~VALID; sent_by(s); find_part(); part_valid() }
  od
}

active proctype source() {
end:
  do
  :: d_step { at_offer == AT_none && !seen -> offer_offer(); check() }
  :: d_step { OFFER_LIVES -> offer_expire(); check() }
  /* A push: to one of the reservations that there are; prefill computes; its owner says so. */
  :: d_step { PUSHES && OFFER_LIVES && pushed_to == NO && started[0] && !dead[0] -> pushed_to = 0; PUSH_TO(0) }
  :: d_step { PUSHES && OFFER_LIVES && pushed_to == NO && started[1] && !dead[1] -> pushed_to = 1; PUSH_TO(1) }
  :: d_step { PUSHES && OFFER_LIVES && !(computed & 1) -> computed = computed | 1; said = said | 1; TOLD }
  :: d_step { PUSHES && OFFER_LIVES && !(computed & 2) -> computed = computed | 2; said = said | 2; TOLD }
  :: d_step { PUSHES && OFFER_LIVES && said == 3 && !owner_committed -> owner_committed = true; TOLD }
  :: d_step { OFFER_LIVES -> offer_cancel(); check() }
  /* The owner reuses its blocks once they are released. */
  :: d_step { offer_released && content != 0 -> content = 0 }
  :: d_step { AGAIN && at_offer == AT_ended && !again -> again = true; at_offer = AT_none; offer_offer() }
  /* It crashes: all it knew is gone, and its blocks hold anything. */
  :: d_step { LIVES && !epoch ->
       epoch = 1; at_offer = AT_none; validated = 0; seen = false; content = 0;
       offer_held = false; offer_outcome = false; offer_released = false; death_unnoticed = false;
       pushed_to = NO; push_life = 0; computed = 0; said = 0; told = 0; owner_committed = false; told_commit = false;
       at_grant[0] = AT_none; at_grant[1] = AT_none; at_grant[2] = AT_none; at_grant[3] = AT_none;
       crash_unnoticed[0] = started[0]; crash_unnoticed[1] = started[2] }
  :: d_step { crash_unnoticed[0] -> crash_unnoticed[0] = false; from_source = 0;
       p = 0; from_life = life[0]; part_peer_lost();
       p = 1; from_life = life[1]; part_peer_lost() }
  :: d_step { crash_unnoticed[1] -> crash_unnoticed[1] = false; from_source = 0; from_life = 0;
       p = 2; part_peer_lost();
       p = 3; part_peer_lost() }
  /* Target 0 crashes: what it was doing ends with it, and its messages are still on their way. */
  :: d_step { DEATHS && !target_life && (at_part[0] != AT_none || at_part[1] != AT_none) ->
       target_life = 1; death_unnoticed = true; i = 0;
       do
       :: i < 2 ->
          if
          :: started[i] && !released[i] ->
             dead[i] = true; at_part[i] = AT_none; at_pull[i] = AT_none; copier[i] = 0; converter[i] = 0; held[i] = false
          :: else
          fi;
          i++
       :: else -> break
       od;
       skip }
  :: d_step { death_unnoticed -> death_unnoticed = false;
       from_target = 0; from_life = 0; from_source = epoch; by_peer = 1; g = 0; m = 0;
       do
       :: g < 4 ->
          if
          :: PUSHES && g == pushed_to && at_offer == AT_offered && dead[g] -> m = g; offer_peer_lost()
          :: else
          fi;
          if
          :: at_grant[g] == AT_parked || READS(g) -> grant_peer_lost()
          :: else
          fi;
          g++
       :: else -> break
       od;
       check() }
  /* P5: nothing is left to happen, so everything has ended: one outcome, and released. */
  :: timeout ->
     d_step {
       assert(!OFFER_LIVES && offer_outcome && offer_released && !offer_held);
       i = 0;
       do
       :: i < 4 -> assert(!started[i] || dead[i] || (outcome[i] && released[i] && !held[i])); i++
       :: else -> break
       od;
       skip
     };
     break
  od
}
