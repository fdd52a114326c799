/* One lane: a producer, a hub, kills of both, redelivery, sleep and wake. docs/adr/0001-lanes.md is the protocol; README.md says what
 * is modelled and how to run it. Each statement or d_step is one access to one shared word, with the private work that goes with it.
 *
 * -DM= slots, -DN= records, -DHOLD= leases at a time, -DKILLS= kills at most (the producer at most once), -DABORTS= -DSPURIOUS= -DREPEATS=
 * at most so many; -DCHECK= the properties to assert (all). -DBUG_... plants one error, which check.sh --mutations expects to be found.
 */
#ifndef M
#define M 2
#endif
#ifndef N
#define N 3
#endif
#ifndef HOLD
#define HOLD 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef ABORTS
#define ABORTS 0
#endif
#ifndef SPURIOUS
#define SPURIOUS 0
#endif
#ifndef REPEATS
#define REPEATS 0
#endif
#ifndef CHECK
#define CHECK 511
#endif

#define COMMITTED 1 /* only committed records leave the consumer */
#define BYTES 2     /* whole, their own, unchanged while leased */
#define TWICE 4     /* never after the release, once per hub, a second time only with the mark */
#define MARK 8      /* redelivered exactly where a killed consumer had begun to hand it out: sequence < head at takeover */
#define ORDER 16    /* by sequence, none left out */
#define RING 32     /* never overflows */
#define REST 64     /* in the end everything committed was handed out and released: nothing lost, no hub asleep over it */
#define SPACE 128   /* no producer asleep over free space */
#define UNLINK 256  /* a dead lane is removed, and only when everything committed in it was released */

#define check(property, condition) assert(!(CHECK & (property)) || (condition))

/* ---- shared memory ---- */
bit magic, hub_sleeping, space_waiting, arrivals_moved;
byte tail, head;
byte ring[M], generation[M], sequence[M], meta[M], payload[M], released[M];

/* Of a futex word only "has it changed since the sleeper loaded it" matters. */
#define LOADED 1
#define MOVED 2
byte doorbell, space_bell; /* 0: no sleeper has loaded it */
#define add_to(bell) bell = (bell -> MOVED : 0)

/* ---- the kernel ---- */
bit hub_asleep, producer_asleep; /* in futex_wait */
bit producer_gone;               /* killed or exited: its lock is free */
bit hub_up, unlinked;

/* ---- private to the hub's process: a kill clears it ---- */
bit known;      /* the lane is adopted; the watcher looks at it */
bit death_seen; /* the watcher found the producer's lock free */
byte held, lease_generation[M], lease_record[M]; /* generation 0: no lease */
byte release_step, last_slot, last_generation, watch_step;
#ifdef BUG_FLAG_BEFORE_RELEASED
bit flag;
#endif
#ifdef BUG_RELEASED_AGAIN_LATER
byte old_slot, old_generation;
#endif

/* ---- bookkeeping of the proof ---- */
byte handed_ever, handed_now, freed; /* bit n: record n left a consumer; left this one; its release was stored */
byte offered, offered_before;        /* bit n: head was stored for record n; by a consumer that was killed */
byte kills, aborts, spurious, repeats;
bit producer_done;

#define bit_of(n) (1 << (n))
#define below(n) (bit_of(n) - 1)
#define slot_free(s) (released[s] == generation[s])
#define touched(s) (payload[s] > 0)
#if M > 2
#define all_free (slot_free(0) && slot_free(1) && slot_free(2))
#else
#define all_free (slot_free(0) && slot_free(1))
#endif

/* ------------------------------------------------------------------------------------------------------------------ producer */

inline wake_hub() {
    if
    :: hub_sleeping -> add_to(doorbell); hub_asleep = 0
    :: else
    fi
}

inline fill(word, value) { d_step { check(BYTES, lease_generation[s] == 0 && slot_free(s)); word = value } }

proctype Producer() {
    byte s, n;
    bit large;
#ifdef BUG_FLAG_BEFORE_TAIL
    bit flag;
#endif
    {
        magic = 1;
        arrivals_moved = 1;
#ifndef BUG_ARRIVAL_ONLY_COUNTED
        wake_hub();
#endif
claim: /* any free slot; of the untouched ones, which are alike, the first */
        if
        :: n == N -> goto done
        :: d_step { n < N && slot_free(0) -> s = 0 }
        :: d_step { n < N && slot_free(1) && touched(0) -> s = 1 }
#if M > 2
        :: d_step { n < N && slot_free(2) && touched(1) -> s = 2 }
#endif
        :: n < N && !all_free -> goto no_space           /* even if some are: a scan reads slot by slot */
        :: n < N && !all_free -> large = 1; goto no_space /* a record that needs the whole data area */
        fi;
write:
        fill(payload[s], 0); /* half written */
        fill(payload[s], n + 1);
#ifdef BUG_GENERATION_BEFORE_BODY
        generation[s] = generation[s] + 1;
        sequence[s] = n;
        meta[s] = n + 1;
#else
        fill(sequence[s], n);
        fill(meta[s], n + 1);
#endif
        if
        :: d_step { aborts > 0 -> aborts--;
#ifdef BUG_ABORT_BUMPS
                    generation[s] = generation[s] + 1;
#endif
                    s = 0 };
           goto claim
#if defined(BUG_GENERATION_BEFORE_BODY) || defined(BUG_TAIL_BEFORE_GENERATION)
        :: true
#else
        :: generation[s] = generation[s] + 1
#endif
        fi;
#ifdef BUG_FLAG_BEFORE_TAIL
        flag = hub_sleeping;
#endif
#ifdef BUG_TAIL_BEFORE_RING
        tail = n + 1;
        ring[n % M] = s;
#else
        d_step { check(RING, n - head < M); ring[n % M] = s };
        tail = n + 1;
#endif
#ifdef BUG_TAIL_BEFORE_GENERATION
        generation[s] = generation[s] + 1;
#endif
        d_step { s = 0; n++ };
#ifdef BUG_FLAG_BEFORE_TAIL
        if
        :: flag -> add_to(doorbell); hub_asleep = 0
        :: else
        fi;
#else
        wake_hub();
#endif
        goto claim;
no_space:
#ifndef BUG_SPACE_BELL_LOADED_LATE
        space_bell = LOADED;
#endif
        space_waiting = 1;
#ifndef BUG_NO_RECHECK_BY_PRODUCER
        s = 0;
        do
        :: s < M && slot_free(s) != large -> break
        :: s < M && slot_free(s) == large -> s++ /* small: the first free one; large: until one is not free */
        :: s == M -> break
        od;
        if
        :: (s < M) != large -> d_step { space_waiting = 0; space_bell = 0; s = (large -> 0 : s); large = 0 }; goto write
        :: else -> s = 0
        fi;
#endif
#ifdef BUG_SPACE_BELL_LOADED_LATE
        space_bell = LOADED;
#endif
        if
#ifdef BUG_WAIT_WITHOUT_COMPARE
        :: d_step { true -> space_bell = 0; producer_asleep = 1 }
#else
        :: d_step { space_bell == LOADED -> space_bell = 0; producer_asleep = 1 }
        :: d_step { space_bell == MOVED -> space_bell = 0 }
#endif
        fi;
        !producer_asleep;
        goto no_space;
done:
        producer_done = 1;
        if
        :: producer_gone = 1 /* exits */
        :: true
        fi
    } unless { d_step { producer_gone -> s = 0; n = 0; large = 0; space_bell = 0; producer_asleep = 0 } }
}

/* ----------------------------------------------------------------------------------------------------------------------- hub */

/* Record `next`, which is in slot s. */
inline hand_out(again) {
    d_step {
        check(COMMITTED, next < tail);
        check(BYTES, m == next + 1 && payload[s] == next + 1);
        check(TWICE, !((freed | handed_now) & bit_of(next)));
        check(TWICE, !(handed_ever & bit_of(next)) || again);
        check(MARK, again == ((offered_before & bit_of(next)) > 0));
        check(ORDER, ((freed | handed_now) & below(next)) == below(next));
        handed_ever = handed_ever | bit_of(next);
        handed_now = handed_now | bit_of(next);
        lease_generation[s] = g;
        lease_record[s] = next + 1;
        held++
    }
}

inline store_head() { d_step { head = next + 1; offered = offered | bit_of(next) } }

inline take() {
    g = generation[s];
    d_step { check(BYTES, sequence[s] == next); check(BYTES, g != released[s]) };
    m = meta[s];
#ifdef BUG_HEAD_AFTER_HAND_OUT
    hand_out((next < h));
#endif
#ifdef BUG_HEAD_GOES_BACK
    store_head();
#else
    if
#ifdef BUG_ADOPTED_WITHOUT_HEAD
    :: next >= h && !adopting -> store_head()
#else
    :: next >= h -> store_head()
#endif
    :: else
    fi;
#endif
#ifndef BUG_HEAD_AFTER_HAND_OUT
    hand_out((next < h));
#endif
    d_step { next++; s = 0; g = 0; m = 0 }
}

inline scan_slots() {
    do
    :: s < M ->
#ifdef BUG_SEQUENCE_BEFORE_GENERATION
        m = sequence[s];
        d_step { g = generation[s];
#else
        g = generation[s];
        d_step { m = sequence[s];
#endif
            if
#if defined(BUG_SCAN_BEFORE_TAIL) || defined(BUG_SCAN_IGNORES_TAIL)
            :: g != released[s] -> slot_of[m] = s + 1
#else
            :: g != released[s] && m < t -> slot_of[m] = s + 1
#endif
            :: else
            fi;
            g = 0; m = 0; s++
        }
    :: else -> break
    od;
    s = 0
}

proctype Hub() {
    byte t, next, s, g, m, h;
    byte slot_of[N + 1];
#ifdef BUG_ADOPTED_WITHOUT_HEAD
    bit adopting;
#endif
names:
    {
#ifndef BUG_ARRIVALS_LOADED_LATE
        arrivals_moved = 0;
#endif
        if
        :: d_step { !known && magic && !unlinked -> known = 1 }
        :: else ->
#ifdef BUG_ARRIVALS_LOADED_LATE
            arrivals_moved = 0;
#endif
            goto poll
        fi;
#ifdef BUG_ARRIVALS_LOADED_LATE
        arrivals_moved = 0;
#endif
#ifdef BUG_SCAN_BEFORE_TAIL
        scan_slots();
        t = tail;
#else
        t = tail;
        scan_slots();
#endif
#ifdef BUG_SCAN_IGNORES_TAIL
        t = N;
#endif
        h = head;
#ifdef BUG_HEAD_JUMPS_AT_TAKEOVER
        head = t;
#endif
#ifndef BUG_NO_BELL_AT_TAKEOVER
        add_to(space_bell);
        producer_asleep = 0;
#endif
#ifdef BUG_ADOPTED_WITHOUT_HEAD
        adopting = 1;
#endif
        do
        :: d_step { next < t && slot_of[next] && held < HOLD -> s = slot_of[next] - 1; slot_of[next] = 0 };
           take()
        :: next < t && !slot_of[next] -> next++
        :: d_step { next >= t -> h = 0; offered_before = 0; t = 0 }; break
        od;
#ifdef BUG_ADOPTED_WITHOUT_HEAD
        adopting = 0;
#endif
poll:
        if
        :: !known
        :: d_step { known && held < HOLD -> t = tail }
        fi;
        if
        :: d_step { next < t -> s = ring[next % M]; t = 0 };
           take();
           goto poll
        :: else -> t = 0
        fi;
        if
        :: death_seen && held == 0 -> /* takes the producer's lock, then decides */
#ifndef BUG_UNLINK_BY_OLD_TAIL
            t = tail;
#endif
            if
            :: next < t -> t = 0; goto poll
            :: else ->
                d_step {
                    check(UNLINK, producer_gone && freed == below(tail));
                    unlinked = 1; known = 0; death_seen = 0; t = 0
                }
            fi
        :: else
        fi;
#ifndef BUG_DOORBELL_LOADED_LATE
        doorbell = LOADED;
#endif
        hub_sleeping = 1;
#ifndef BUG_NO_RECHECK_BY_HUB
        if
        :: known && tail != next -> goto awake
        :: else
        fi;
        if
        :: arrivals_moved -> goto awake
        :: else
        fi;
        if
        :: death_seen && held == 0 -> goto awake
        :: else
        fi;
#endif
#ifdef BUG_DOORBELL_LOADED_LATE
        doorbell = LOADED;
#endif
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
        :: else -> goto poll
        fi
    } unless {
        d_step {
            !hub_up -> t = 0; next = 0; g = 0; m = 0; h = 0; doorbell = 0;
            for (s : 0 .. N) { slot_of[s] = 0 };
            s = 0;
#ifdef BUG_ADOPTED_WITHOUT_HEAD
            adopting = 0;
#endif
            hub_up = 1
        };
        goto names
    }
}

/* The hub's other threads: the one that drops the last view ends the lease, in any order; the watcher. */
inline end_lease(s) {
    d_step {
        release_step == 0 && lease_generation[s] ->
        check(BYTES, payload[s] == lease_record[s]);
        released[s] = lease_generation[s];
        freed = freed | bit_of(lease_record[s] - 1);
        handed_now = handed_now & ~bit_of(lease_record[s] - 1);
        handed_ever = handed_ever & ~bit_of(lease_record[s] - 1);
        offered = offered & ~bit_of(lease_record[s] - 1);
        last_slot = s; last_generation = lease_generation[s];
        lease_generation[s] = 0; lease_record[s] = 0; held--;
#ifdef BUG_FLAG_BEFORE_RELEASED
        release_step = (flag -> 2 : 4);
        last_slot = 0; last_generation = 0
#else
        release_step = 1
#endif
    }
}

proctype Threads() {
end:
    do
    :: end_lease(0)
    :: end_lease(1)
#if M > 2
    :: end_lease(2)
#endif
#ifdef BUG_FLAG_BEFORE_RELEASED
    :: d_step { release_step == 0 && held > 0 && flag != space_waiting -> flag = space_waiting }
#endif
#ifdef BUG_RELEASED_BEFORE_LAST_READ
    :: d_step { lease_generation[0] && released[0] != lease_generation[0] -> released[0] = lease_generation[0] }
#endif
#ifdef BUG_RELEASED_AGAIN_LATER
    :: d_step { release_step == 1 && !old_generation -> old_slot = last_slot; old_generation = last_generation }
    :: d_step { old_generation -> released[old_slot] = old_generation; old_slot = 0; old_generation = 0 }
#endif
#ifdef BUG_SECOND_SLEEPER
    :: d_step { hub_asleep && hub_sleeping -> hub_sleeping = 0 }
#endif
    :: d_step { release_step == 1 && repeats > 0 -> repeats--; released[last_slot] = last_generation }
    :: d_step { release_step == 1 -> release_step = (space_waiting -> 2 : 4); last_slot = 0; last_generation = 0 }
    :: d_step { release_step == 2 -> add_to(space_bell); release_step = 3 }
    :: d_step { release_step == 3 -> producer_asleep = 0; release_step = 4 }
#ifdef BUG_LAST_RELEASE_SILENT
    :: d_step { release_step == 4 -> release_step = 0 }
#else
    :: d_step { release_step == 4 -> release_step = (death_seen -> 5 : 0) }
#endif
    :: d_step { release_step == 5 -> add_to(doorbell); release_step = 6 }
    :: d_step { release_step == 6 -> hub_asleep = 0; release_step = 0 }
#ifndef BUG_NO_WATCHER
    :: d_step { watch_step == 0 && known && producer_gone && !death_seen -> death_seen = 1; watch_step = 1 }
#endif
    :: d_step { watch_step == 1 -> add_to(doorbell); watch_step = 2 }
    :: d_step { watch_step == 2 -> hub_asleep = 0; watch_step = 0 }
    od
}

/* -------------------------------------------------------------------------------------------------------- kills, and the end */

inline forget(s) { lease_generation[s] = 0; lease_record[s] = 0 }

proctype Fate() {
end:
    do
    :: d_step {
           kills > 0 && hub_up -> kills--;
           hub_up = 0; hub_asleep = 0; known = 0; death_seen = 0; held = 0; release_step = 0; watch_step = 0;
           last_slot = 0; last_generation = 0;
           forget(0); forget(1);
#if M > 2
           forget(2);
#endif
#ifdef BUG_FLAG_BEFORE_RELEASED
           flag = 0;
#endif
#ifdef BUG_RELEASED_AGAIN_LATER
           old_slot = 0; old_generation = 0;
#endif
           handed_now = 0; offered_before = offered
       }
    :: d_step { kills > 0 && !producer_gone -> kills--; producer_gone = 1; producer_asleep = 0 }
    :: d_step { spurious > 0 && hub_asleep -> spurious--; hub_asleep = 0 }
    :: d_step { spurious > 0 && producer_asleep -> spurious--; producer_asleep = 0 }
    od
}

/* Nothing can move any more, and no tick will help: all work must be done. */
proctype End() {
    timeout -> d_step {
        check(REST, freed == below(tail));
        check(SPACE, producer_done || producer_gone);
        check(UNLINK, !(known && producer_gone))
    }
}

init {
    atomic {
        select(kills : 0 .. KILLS);
        select(spurious : 0 .. SPURIOUS);
        aborts = ABORTS; repeats = REPEATS;
        hub_up = 1;
        run Producer(); run Hub(); run Threads(); run Fate(); run End()
    }
}
