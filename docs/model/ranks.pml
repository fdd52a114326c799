/* Two lanes and the ranks that read them: two producers, a hub, one or two ranks, kills of any of them. README.md says what is modelled and
 * how to run it. Each statement or d_step is one access to one shared word or one message, with the private work that goes with it; what
 * lane.pml proves step by step for one lane (writing a record, scanning, taking) is one step here.
 *
 * -DM0= -DM1= slots of the lanes, -DN0= -DN1= records (each at most 4), -DRANKS= 1 or 2, -DBROADCAST, -DKILLS= at most (a producer once),
 * -DSPREAD (with two ranks) the hub hands over what a dead rank leaves, and one rank may stay dead; -DRANKS_ONLY kills are of ranks,
 * -DREPEATS= asks or dones sent again, at most, -DLATE the lanes appear during the run, -DLOCK_BOTH a rank may move on with views of the old epoch,
 * holding both locks; -DCHECK= the properties to assert (all). -DBUG_... plants one error, which check.sh --mutations expects to be found.
 */
#ifndef M0
#define M0 3
#endif
#ifndef M1
#define M1 1
#endif
#ifndef N0
#define N0 2
#endif
#ifndef N1
#define N1 2
#endif
#ifndef RANKS
#define RANKS 1
#endif
#ifndef KILLS
#define KILLS 2
#endif
#ifndef REPEATS
#define REPEATS 0
#endif
#ifndef CHECK
#define CHECK 1023
#endif

#define COMMITTED 1   /* only committed records leave the hub */
#define TWICE 2       /* released once; from one hub once, a second time only with the mark */
#define MARK 4        /* redelivered exactly where a killed hub had stored head; reissued where a rank of this number may have seen it */
#define ORDER 8       /* by sequence in each lane, none left out */
#define REST 16       /* in the end everything committed was read and released: nothing lost, no process asleep over it */
#define SPACE 32      /* no producer asleep over free space */
#define UNLINK 64     /* a dead lane is removed, and only when everything committed in it was released */
#define RANK_BYTES 128 /* nothing is released, hence nothing written, while a rank looks at it */
#define SHARE 256     /* a record is released only after each rank that was to read it, or its successor, did */
#define OPENED 512    /* a rank opens the record that the manifest names */

#define check(property, condition) assert(!(CHECK & (property)) || (condition))

/* Record n of lane l is number 4 * l + n, and bit 4 * l + n of a set. Steps and epochs start at 1; a message is epoch * 16 + step. */
#define bit_of(n) (1 << (n))
#define below(n) (bit_of(n) - 1)
#define lane_set(l) (15 << (4 * (l)))
#define lane_of(k) ((k) >> 2)
#define M(l) ((l) -> M1 : M0)
#define N(l) ((l) -> N1 : N0)
#define message(e, s) ((e) * 16 + (s))
#define epoch_of(m) ((m) >> 4)
#define step_of(m) ((m) & 15)
#define EPOCHS (KILLS + 2)

/* ---- shared memory: the control segment ---- */
byte epoch;
bit hub_sleeping, arrivals_moved;
/* Of a futex word only "has it changed since the sleeper loaded it" matters. */
#define LOADED 1
#define MOVED 2
byte doorbell, space_bell[2]; /* 0: no sleeper has loaded it */
#define add_to(bell) bell = (bell -> MOVED : 0)

/* ---- shared memory: the lanes ---- */
bit magic[2], space_waiting[2];
byte tail[2], head[2];
byte slot[6];  /* 3 * l + s: 1 + n of the record whose generation is in the slot; 0: never used */
byte place[8]; /* where record k was put: 1 + s. Part of its manifest */
byte freed;    /* set of records whose generation was stored in `released` */

#define slot_of(k) slot[3 * lane_of(k) + place[k] - 1]
#define slot_free(l, s) (slot[3 * (l) + (s)] == 0 || (freed & bit_of(4 * (l) + slot[3 * (l) + (s)] - 1)))
#define some_free(l) (slot_free(l, 0) || (M(l) > 1 && slot_free(l, 1)) || (M(l) > 2 && slot_free(l, 2)))

/* ---- the kernel ---- */
bit hub_asleep, producer_asleep[2]; /* in futex_wait */
bit producer_gone[2];               /* killed or exited: its lock is free */
bit hub_up, unlinked[2];
bit rank_killed[RANKS];
#ifdef SPREAD
byte missing; /* 1 + the rank whose number no process takes again; 0: none */
#endif
byte process[RANKS]; /* how many processes have had the rank's number before: the order of their stamps */
byte locks[RANKS];   /* bit e: byte 2^32 + e is locked by the process with this number */

/* ---- on the control socket. What a killed rank sent may come at any time later; what was sent to it is lost ---- */
#define BOX(r, p) ((r) * (KILLS + 1) + (p))
byte asked[RANKS * (KILLS + 1)]; /* by process p of number r, in this epoch: "all up to this step is done with; the next, please" */
#define MAIL(r, e) ((r) * EPOCHS + (e))
byte mail_step[RANKS * EPOCHS], mail_set[RANKS * EPOCHS]; /* a manifest, from the hub of that epoch */
bit mail_reissued[RANKS * EPOCHS];

/* ---- private to a rank's process ---- */
byte views[RANKS], kept[RANKS]; /* records it looks at: of its epoch; of the one before */

/* ---- private to the hub's process: a kill clears it ---- */
byte hub_epoch;    /* 0: not yet serving */
bit known[2], death_seen[2];
byte next[2], todo, leased, old; /* old: adopted with sequence < head */
byte queued[RANKS], share[RANKS], step[RANKS]; /* to be issued; issued and not done; its step */
byte heard[RANKS]; /* 1 + the latest process of this number that asked: the one the share was issued to */
bit reissued[RANKS]; /* the share that is out was issued before, to a process that died */
#ifdef SPREAD
byte said, touched, moved; /* sets of leased records: some rank said done; issued to one that died; touched, then given to the other */
#endif
bit range_free;    /* was seen: no byte of an earlier epoch is locked */
byte release_step, release_lane, watch_step;

/* ---- bookkeeping of the proof ---- */
byte discarded;        /* set of leased records that the hub will not issue */
byte offered, before;  /* sets of un-released records: head was stored for it; by a hub that was killed */
byte opened[RANKS], finished[RANKS]; /* by a rank of this number, in the hub's epoch: opened; read to the end of the share */
byte kills, repeats;
hidden byte i, j;

#if RANKS > 1
#define busy (queued[0] | share[0] | queued[1] | share[1])
#define looked_at (views[0] | kept[0] | views[1] | kept[1])
#define all_locks (locks[0] | locks[1])
#else
#define busy (queued[0] | share[0])
#define looked_at (views[0] | kept[0])
#define all_locks locks[0]
#endif
/* Sharded: to one rank, and by the next hub to the other. */
#ifdef BROADCAST
#define reads(r, k) true
#else
#define reads(r, k) ((((k) & 3) + lane_of(k) + hub_epoch) % RANKS == (r))
#endif
#define committed_set (below(tail[0]) | (below(tail[1]) << 4))

/* ------------------------------------------------------------------------------------------------------------------ producer */

inline wake_hub() {
    if
    :: hub_sleeping ->
#ifdef BUG_WAKER_CLEARS_FLAG
        hub_sleeping = 0;
#endif
        add_to(doorbell);
        hub_asleep = 0
    :: else
    fi
}

proctype Producer(bit l) {
    byte n;
#ifndef LATE
end_claim:
#endif
    {
#ifdef LATE
        magic[l] = 1;
        arrivals_moved = 1;
        wake_hub();
end_claim:
#endif
        if
        :: d_step { /* payload, body, generation and ring entry, in the first free slot */
               n < N(l) && some_free(l) ->
               i = (slot_free(l, 0) -> 0 : (M(l) > 1 && slot_free(l, 1) -> 1 : 2));
               check(RANK_BYTES, slot[3 * l + i] == 0 || !(looked_at & bit_of(4 * l + slot[3 * l + i] - 1)));
               n++;
               slot[3 * l + i] = n;
               place[4 * l + n - 1] = i + 1
           }
#ifndef COARSE
        :: d_step { n < N(l) && !some_free(l) -> space_bell[l] = LOADED }; goto no_space
#endif
        fi;
        tail[l] = n;
#ifndef COARSE
        wake_hub();
#endif
        goto end_claim;
#ifndef COARSE
no_space:
        space_waiting[l] = 1;
        if
        :: d_step { some_free(l) -> space_waiting[l] = 0; space_bell[l] = 0 }; goto end_claim
        :: !some_free(l)
        fi;
        if
        :: d_step { space_bell[l] == LOADED -> space_bell[l] = 0; producer_asleep[l] = 1 }
        :: d_step { space_bell[l] == MOVED -> space_bell[l] = 0 }
        fi;
        atomic { !producer_asleep[l]; space_bell[l] = LOADED };
        goto no_space
#endif
    } unless { d_step { producer_gone[l] -> n = 0; space_bell[l] = 0; producer_asleep[l] = 0 } }
}

/* ----------------------------------------------------------------------------------------------------------------------- hub */

/* Head, then the lease and the queues, which are private: a kill between them looks like one after them. */
inline take(k, discard) {
    check(COMMITTED, committed_set & bit_of(k));
    check(TWICE, !((freed | leased) & bit_of(k)));
    check(TWICE, !(offered & bit_of(k)) || (k & 3) < head[lane_of(k)]);
    check(MARK, ((k & 3) < head[lane_of(k)]) == ((before & bit_of(k)) > 0));
    check(ORDER, ((freed | leased) & lane_set(lane_of(k)) & below(k)) == (lane_set(lane_of(k)) & below(k)));
    if
    :: (k & 3) < head[lane_of(k)] -> old = old | bit_of(k)
    :: else -> head[lane_of(k)] = (k & 3) + 1
    fi;
    offered = offered | bit_of(k);
    before = before & ~bit_of(k);
    leased = leased | bit_of(k);
    discarded = discarded | (discard -> bit_of(k) : 0);
    for (j : 0 .. RANKS - 1) {
        if
        :: reads(j, k) && !discard -> queued[j] = queued[j] | bit_of(k)
        :: else
        fi
    };
    j = 0
}

/* Takes the lowest record out of a set. */
#define lowest_of_4(set) ((set) & 1 -> 0 : ((set) & 2 -> 1 : ((set) & 4 -> 2 : 3)))
inline lowest(set) {
    i = ((set & 15) -> lowest_of_4(set) : 4 + lowest_of_4(set >> 4));
    set = set & ~bit_of(i)
}

/* tail, the scan, and head: records to take before those of the ring. */
inline adopt(l) {
    if
    :: magic[l] && !known[l] && !unlinked[l] ->
        known[l] = 1;
        next[l] = tail[l];
        todo = todo | (committed_set & lane_set(l) & ~freed)
    :: else
    fi
}

#ifdef NO_RANKS
#define BY_HUB 1
#else
#define BY_HUB 0
#endif

#define waits(l) (known[l] && next[l] < tail[l])
proctype Hub() {
begin:
    {
        atomic {
            epoch++;
            hub_epoch = epoch;
            for (i : 0 .. RANKS - 1) { opened[i] = 0; finished[i] = 0 }
        };
names:
#ifdef COARSE
        atomic { adopt(0); adopt(1) };
#else
        arrivals_moved = 0;
        atomic { adopt(0) };
        add_to(space_bell[0]); /* the predecessor may have died between release and wake */
        producer_asleep[0] = 0;
        atomic { adopt(1) };
        add_to(space_bell[1]);
        producer_asleep[1] = 0;
#endif
end_poll:
        do
#ifndef NO_RANKS
        :: d_step { todo -> lowest(todo); take(i, 0) }
#endif
        :: d_step { todo -> lowest(todo); take(i, 1) } /* not for ranks: the hub reads it, or discards it as stale */
        :: d_step { !todo && waits(0) -> i = next[0]; next[0]++; take(i, BY_HUB) }
        :: d_step { !todo && waits(1) -> i = 4 + next[1]; next[1]++; take(i, BY_HUB) }
#ifndef COARSE
        :: atomic { !todo && !waits(0) && !waits(1) -> doorbell = LOADED; break }
#endif
        od;
#ifndef COARSE
        hub_sleeping = 1;
        if
        :: waits(0) -> goto awake
        :: else
        fi;
#ifndef BUG_RECHECK_OF_ONE_LANE
        if
        :: waits(1) -> goto awake
        :: else
        fi;
#endif
        if
        :: arrivals_moved -> goto awake
        :: else
        fi;
        if
        :: d_step { doorbell == LOADED -> doorbell = 0; hub_asleep = 1 }
        :: d_step { doorbell == MOVED -> doorbell = 0 }
        fi;
end_asleep:
        !hub_asleep;
awake:
        atomic { hub_sleeping = 0; doorbell = 0 };
        if
        :: arrivals_moved -> goto names
        :: else -> goto end_poll
        fi
#endif
    } unless {
        d_step { !hub_up -> doorbell = 0; hub_up = 1 };
        goto begin
    }
}

/* The manifest of the share that is out, to the process it was issued to, if that still lives. */
inline send_manifest(r) {
    if
    :: heard[r] == process[r] + 1 ->
        mail_step[MAIL(r, hub_epoch)] = step[r];
        mail_set[MAIL(r, hub_epoch)] = share[r];
        mail_reissued[MAIL(r, hub_epoch)] = reissued[r]
    :: else
    fi
}

inline clear_mail(r, x) { mail_step[MAIL(r, x)] = 0; mail_set[MAIL(r, x)] = 0; mail_reissued[MAIL(r, x)] = 0 }

/* The message of process p of rank r. As long as there is nothing to answer, it waits. */
#define from_holder(r, p) (heard[r] == (p) + 1)
#ifdef BUG_MESSAGE_WITHOUT_EPOCH
#define this_epoch(r, p) true
#else
#define this_epoch(r, p) (epoch_of(asked[BOX(r, p)]) == hub_epoch)
#endif
#ifdef BUG_ASK_BY_NUMBER
#define of_the_dead(r, p) false
#define of_a_new_one(r, p) (heard[r] != (p) + 1)
#else
#define of_the_dead(r, p) (heard[r] > (p) + 1)
#define of_a_new_one(r, p) (heard[r] < (p) + 1)
#endif
#ifdef BUG_DONE_WITHOUT_STEP
#define says_done(r, p) (from_holder(r, p) && step_of(asked[BOX(r, p)]) > 0)
#elif defined(BUG_DONE_BY_NUMBER)
#define says_done(r, p) (step_of(asked[BOX(r, p)]) == step[r])
#else
#define says_done(r, p) (from_holder(r, p) && step_of(asked[BOX(r, p)]) == step[r])
#endif

inline end_share(r) {
#ifdef SPREAD
    said = said | share[r];
#endif
#ifdef BUG_FIRST_DONE_RELEASES
    queued[1 - r] = queued[1 - r] & ~share[r];
    share[1 - r] = share[1 - r] & ~share[r];
#endif
    share[r] = 0;
    reissued[r] = 0
}

#ifdef SPREAD
#define was_moved(r) ((share[r] & moved) != 0)
#else
#define was_moved(r) 0
#endif

/* Rank r is dead and the other one lives: shares that no other rank reads and none has said done go to it. */
inline hand_over(r) {
    d_step {
        hub_epoch && rank_killed[r] && !rank_killed[1 - r] && (queued[r] | share[r]) ->
        i = (queued[r] | share[r]) & ~(queued[1 - r] | share[1 - r]);
#ifndef BUG_DEATH_IS_A_WORD
        i = i & ~said;
        touched = touched | share[r];
        moved = moved | (i & touched);
        queued[1 - r] = queued[1 - r] | i;
#endif
        queued[r] = 0; share[r] = 0; reissued[r] = 0;
        i = 0
    }
}

inline hear(r, p) {
    d_step {
        hub_epoch && asked[BOX(r, p)] && (!this_epoch(r, p) || of_the_dead(r, p) || share[r] || queued[r]) ->
        if
        :: share[r] && this_epoch(r, p) && says_done(r, p) -> end_share(r)
        :: else ->
            if
            :: !this_epoch(r, p) || of_the_dead(r, p)
            :: this_epoch(r, p) && of_a_new_one(r, p) && share[r] ->
                heard[r] = p + 1;
                reissued[r] = 1;
#ifndef BUG_NOT_REISSUED
                send_manifest(r)
#endif
            :: this_epoch(r, p) && from_holder(r, p) && share[r] -> /* asked again: the same answer, mark and all */
#ifdef BUG_ANSWER_AGAIN_UNMARKED
                reissued[r] = 0;
#endif
                send_manifest(r)
            :: this_epoch(r, p) && !of_the_dead(r, p) && !share[r] ->
#ifdef BUG_DONES_COUNTED
                share[1 - r] = (from_holder(r, p) -> 0 : share[1 - r]);
#endif
                heard[r] = p + 1;
                step[r]++;
                share[r] = queued[r];
                queued[r] = 0;
                reissued[r] = was_moved(r);
                send_manifest(r)
            fi;
            asked[BOX(r, p)] = 0
        fi
    }
}

#ifdef SPREAD
#define read_to_the_end(k) ((finished[0] | finished[1]) & bit_of(k))
#elif RANKS > 1
#define read_to_the_end(k) ((!reads(0, k) || (finished[0] & bit_of(k))) && (!reads(1, k) || (finished[1] & bit_of(k))))
#else
#define read_to_the_end(k) (finished[0] & bit_of(k))
#endif

#ifdef BUG_RELEASES_AT_ONCE
#define put_off(k) false
#else
#define put_off(k) ((old & bit_of(k)) && !range_free)
#endif

inline end_lease(k) {
    d_step {
        release_step == 0 && (leased & ~busy & bit_of(k)) && !put_off(k) ->
        check(TWICE, !(freed & bit_of(k)));
        check(SHARE, BY_HUB || (discarded & bit_of(k)) || read_to_the_end(k));
        check(RANK_BYTES, !(looked_at & bit_of(k)));
        freed = freed | bit_of(k);
        leased = leased & ~bit_of(k);
        old = old & ~bit_of(k);
        offered = offered & ~bit_of(k);
        discarded = discarded & ~bit_of(k);
#ifdef SPREAD
        said = said & ~bit_of(k);
        touched = touched & ~bit_of(k);
        moved = moved & ~bit_of(k);
#endif
        for (i : 0 .. RANKS - 1) { opened[i] = opened[i] & ~bit_of(k); finished[i] = finished[i] & ~bit_of(k) };
#ifndef COARSE
        release_lane = lane_of(k);
        release_step = 1;
#endif
        i = 0
    }
}

#ifdef BUG_LOOKS_AT_LAST_EPOCH_ONLY
#define earlier_epochs bit_of(hub_epoch - 1)
#elif defined(BUG_RANGE_WITHOUT_LAST_EPOCH)
#define earlier_epochs below(hub_epoch - 1)
#else
#define earlier_epochs below(hub_epoch)
#endif

#ifdef BUG_UNLINK_FORGETS_PUT_OFF
#define unread (leased & (busy | ~old))
#else
#define unread leased
#endif

#ifdef COARSE
#define dead(l) producer_gone[l]
#else
#define dead(l) death_seen[l]
#endif

inline unlink(l) {
    d_step {
        known[l] && dead(l) && !((unread | todo) & lane_set(l)) && next[l] == tail[l] ->
        check(UNLINK, producer_gone[l] && (freed & lane_set(l)) == (committed_set & lane_set(l)));
        unlinked[l] = 1; known[l] = 0; death_seen[l] = 0
    }
}

/* The hub's other threads: the control socket, the end of leases, the watcher. */
proctype Threads() {
end:
    do
#ifndef NO_RANKS
    :: hear(0, 0)
#if KILLS > 0
    :: hear(0, 1)
#endif
#if KILLS > 1
    :: hear(0, 2)
#endif
#if RANKS > 1
    :: hear(1, 0)
#if KILLS > 0
    :: hear(1, 1)
#endif
#if KILLS > 1
    :: hear(1, 2)
#endif
#endif
#endif
#ifdef SPREAD
    :: hand_over(0)
    :: hand_over(1)
#endif
    :: d_step { (leased & old & ~busy) && !range_free && !(all_locks & earlier_epochs) -> range_free = 1 }
    :: end_lease(0)
    :: end_lease(1)
    :: end_lease(2)
    :: end_lease(3)
    :: end_lease(4)
    :: end_lease(5)
    :: end_lease(6)
    :: end_lease(7)
#ifndef COARSE
    :: d_step { release_step == 1 -> release_step = (space_waiting[release_lane] -> 2 : 0); release_lane = (release_step -> release_lane : 0) }
    :: d_step { release_step == 2 -> add_to(space_bell[release_lane]); release_step = 3 }
    :: d_step { release_step == 3 -> producer_asleep[release_lane] = 0; release_step = 0; release_lane = 0 }
    :: d_step { watch_step == 0 && known[0] && producer_gone[0] && !death_seen[0] -> death_seen[0] = 1; watch_step = 1 }
    :: d_step { watch_step == 0 && known[1] && producer_gone[1] && !death_seen[1] -> death_seen[1] = 1; watch_step = 1 }
    :: d_step { watch_step == 1 -> add_to(doorbell); watch_step = 2 }
    :: d_step { watch_step == 2 -> hub_asleep = 0; watch_step = 0 }
#endif
    :: unlink(0)
    :: unlink(1)
    od
}

/* ---------------------------------------------------------------------------------------------------------------------- rank */

#define moved_on (epoch != e)
#ifdef BUG_MANIFEST_WITHOUT_EPOCH
#define for_me(x) (mail_step[MAIL(r, x)] > last)
#elif defined(BUG_MANIFEST_WITHOUT_STEP)
#define for_me(x) ((x) == e)
#else
#define for_me(x) ((x) == e && mail_step[MAIL(r, x)] > last)
#endif
#ifdef BUG_GENERATION_NOT_COMPARED
#define as_named(k) true
#else
#define as_named(k) (slot_of(k) == ((k) & 3) + 1)
#endif

inline take_mail(x) {
    atomic {
        mail_step[MAIL(r, x)] && for_me(x) ->
        set = mail_set[MAIL(r, x)]; last = mail_step[MAIL(r, x)]; again = mail_reissued[MAIL(r, x)];
        clear_mail(r, x);
        goto open
    }
}

/* Copies the slot's body, compares generation and sequence, and has the view. */
inline open_lowest() {
    d_step {
        set -> lowest(set);
        if
        :: as_named(i) ->
            check(OPENED, slot_of(i) == (i & 3) + 1);
            check(RANK_BYTES, !(freed & bit_of(i)));
            check(MARK, e != epoch || !(opened[r] & bit_of(i)) || again);
            views[r] = views[r] | bit_of(i);
            opened[r] = opened[r] | (e == epoch -> bit_of(i) : 0)
        :: else -> check(RANK_BYTES, false)
        fi
    }
}

/* The last view of the share goes, then the message. */
inline say_done() {
    atomic {
        finished[r] = finished[r] | (e == epoch -> views[r] : 0);
        views[r] = 0;
        again = 0;
        asked[BOX(r, process[r])] = message(e, last)
    }
}

proctype Rank(byte r) {
    byte e, last, set, was, to;
    bit again;
join: /* it has its number */
    {
        e = epoch;
#ifdef BUG_LOCKS_LAST
        asked[BOX(r, process[r])] = message(e, 0);
#endif
        locks[r] = locks[r] | bit_of(e);
#if !defined(BUG_NO_RECHECK_AFTER_LOCK) && !defined(BUG_LOCKS_LAST)
        if
        :: epoch == e
        :: epoch != e -> d_step { locks[r] = 0; e = 0 }; goto join
        fi;
#endif
ask:
        say_done();
end_wait:
        do
        :: take_mail(1)
        :: d_step { mail_step[MAIL(r, 1)] && !for_me(1) -> clear_mail(r, 1) }
#if KILLS > 0
        :: take_mail(2)
        :: d_step { mail_step[MAIL(r, 2)] && !for_me(2) -> clear_mail(r, 2) }
#endif
#if KILLS > 1
        :: take_mail(3)
        :: d_step { mail_step[MAIL(r, 3)] && !for_me(3) -> clear_mail(r, 3) }
#endif
        :: d_step { repeats > 0 && !asked[BOX(r, process[r])] -> repeats--; asked[BOX(r, process[r])] = message(e, last) }
        :: atomic { moved_on && !kept[r] -> to = epoch; goto move }
#ifdef LOCK_BOTH
        :: d_step {
               kept[r] -> kept[r] = 0;
               locks[r] = locks[r] & ~bit_of(was); was = 0
           }
#endif
        od;
open: /* one slot after the other */
        do
        :: open_lowest()
#ifdef LOCK_BOTH
        :: atomic { !set && moved_on && !kept[r] -> kept[r] = views[r]; views[r] = 0; was = e; to = epoch; goto move }
#endif
#ifdef BUG_DONE_BEFORE_LAST_VIEW
        :: atomic { !set && views[r] -> asked[BOX(r, process[r])] = message(e, last); goto ask }
#else
        :: atomic { !set -> say_done(); goto end_wait }
#endif
        od;
move:
        locks[r] = locks[r] | bit_of(to);
        if
        :: epoch == to
        :: epoch != to -> atomic { locks[r] = locks[r] & ~bit_of(to); to = epoch }; goto move
        fi;
        atomic {
#ifdef BUG_MOVES_KEEPING_VIEWS
            locks[r] = locks[r] & ~bit_of(e);
#else
            locks[r] = locks[r] & ~(kept[r] -> 0 : bit_of(e));
#endif
            e = to; to = 0; last = 0
        };
        goto ask
    } unless {
#ifdef SPREAD
        d_step { rank_killed[r] -> e = 0; last = 0; set = 0; was = 0; to = 0; again = 0 };
end_dead:
        d_step { missing != r + 1 -> rank_killed[r] = 0 };
#else
        d_step { rank_killed[r] -> rank_killed[r] = 0; e = 0; last = 0; set = 0; was = 0; to = 0; again = 0 };
#endif
        goto join
    }
}

/* -------------------------------------------------------------------------------------------------------- kills, and the end */

inline forget_rank(r) {
    queued[r] = 0; share[r] = 0; step[r] = 0; heard[r] = 0; reissued[r] = 0
}

inline kill_rank(r) {
    d_step {
        kills > 0 && !rank_killed[r] -> kills--;
        rank_killed[r] = 1;
        process[r]++;
        locks[r] = 0; views[r] = 0; kept[r] = 0;
        for (i : 0 .. EPOCHS - 1) { clear_mail(r, i) };
        i = 0
    }
}

inline lose_rank(r) {
    d_step { missing == 0 && rank_killed[r] -> missing = r + 1 }
}

proctype Fate() {
end:
    do
#ifndef RANKS_ONLY
    :: d_step {
           kills > 0 && hub_up -> kills--;
           hub_up = 0; hub_asleep = 0; hub_epoch = 0;
           known[0] = 0; known[1] = 0; death_seen[0] = 0; death_seen[1] = 0;
           next[0] = 0; next[1] = 0; todo = 0; leased = 0; old = 0; discarded = 0;
           forget_rank(0);
#if RANKS > 1
           forget_rank(1);
#endif
#ifdef SPREAD
           said = 0; touched = 0; moved = 0;
#endif
           range_free = 0; release_step = 0; release_lane = 0; watch_step = 0;
           before = offered
       }
    :: d_step { kills > 0 && !producer_gone[0] -> kills--; producer_gone[0] = 1; producer_asleep[0] = 0 }
    :: d_step { kills > 0 && !producer_gone[1] -> kills--; producer_gone[1] = 1; producer_asleep[1] = 0 }
#endif
#ifndef NO_RANKS
    :: kill_rank(0)
#endif
#if RANKS > 1
    :: kill_rank(1)
#endif
#ifdef SPREAD
    :: lose_rank(0)
    :: lose_rank(1)
#endif
    od
}

/* Nothing can move any more, and no tick will help: all work must be done. */
proctype End() {
    timeout -> d_step {
        check(REST, freed == committed_set && !looked_at);
        check(SPACE, (tail[0] == N0 || producer_gone[0]) && (tail[1] == N1 || producer_gone[1]));
        check(UNLINK, !(known[0] && producer_gone[0]) && !(known[1] && producer_gone[1]))
    }
}

init {
    atomic {
        select(kills : 0 .. KILLS);
        select(repeats : 0 .. REPEATS);
        hub_up = 1;
#ifndef LATE
        magic[0] = 1; magic[1] = 1;
#endif
        run Producer(0); run Producer(1); run Hub(); run Threads();
#ifndef NO_RANKS
        run Rank(0);
#endif
#if RANKS > 1
        run Rank(1);
#endif
        run Fate(); run End()
    }
}
