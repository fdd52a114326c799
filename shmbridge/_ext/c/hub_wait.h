/* How the hub waits for records of any lane: a short adaptive spin, then the doorbell; or, where it must not
 * block, the doorbell's rings in an eventfd. Plain C; lane_wait.pxi binds it.
 *
 * The store-load handshake is argued in docs/adr/0001-lanes.md; its other half is lane_commit. One sleeper at
 * a time: hub_sleeping has one owner.
 */
#ifndef SHMBRIDGE_HUB_WAIT_H
#define SHMBRIDGE_HUB_WAIT_H

#include <sys/eventfd.h>

#include "faults.h"
#include "futex.h"
#include "layout.h"
#include "spin.h"

#define HUB_TICK_NS 1000000000

typedef struct {
    shm_u64 **tails; /* of the lanes that are watched */
    uint64_t *next;  /* what each tail is while its lane has nothing new */
    uint32_t count;
    uint32_t arrivals; /* likewise, of the bridge */
    uint32_t heard;    /* the bell, before the thread that may sleep looked at anything */
} hub_watch;

static inline int hub_has_work(const hub_watch *watch, control_header *control) {
    for (uint32_t i = 0; i < watch->count; i++)
        if (load_seq64(watch->tails[i]) != watch->next[i]) return 1; /* SYNC(commit), SYNC(hub-wake) */
    return load_seq32(&control->arrivals) != watch->arrivals;         /* SYNC(bell) */
}

/* Looks for work for a while: the longer, the more often looking has paid. */
static inline int hub_spin(const hub_watch *watch, control_header *control, int64_t timeout_ns,
                           int64_t *spin_ns) {
    int64_t until = monotonic_ns() + (*spin_ns < timeout_ns ? *spin_ns : timeout_ns);
    int work = hub_has_work(watch, control);
    while (!work && monotonic_ns() < until) {
        cpu_relax();
        work = hub_has_work(watch, control);
    }
    spin_learn(spin_ns, work);
    return work;
}

/* From here to hub_disarm every commit rings. 1 if there is work already; *seen is the bell before. */
static inline int hub_arm(const hub_watch *watch, control_header *control, uint32_t *seen) {
    *seen = load_seq32(&control->doorbell); /* SYNC(bell) */
    store_seq32(&control->hub_sleeping, 1); /* SYNC(hub-wake) */
    return hub_has_work(watch, control);
}

static inline void hub_disarm(control_header *control) {
    store_seq32(&control->hub_sleeping, 0);
}

/* Sleeps until there is work, the bell rang or a tick is over. 1 if there may be work, 0 if not; *late if a
 * tick found work without a ring. */
static inline int hub_sleep(const hub_watch *watch, control_header *control, int64_t timeout_ns, int *late) {
    uint32_t seen;
    int status = 0, work;
    *late = 0;
    fault_hit("hub.before_sleep");
    work = hub_arm(watch, control, &seen) || seen != watch->heard;
    if (!work)
        status = futex_wait(&control->doorbell, seen, timeout_ns < HUB_TICK_NS ? timeout_ns : HUB_TICK_NS);
    hub_disarm(control);
    if (status != ETIMEDOUT) return 1;
    work = hub_has_work(watch, control);
    *late = work && load_seq32(&control->doorbell) == seen; /* SYNC(bell) */
    return work;
}

/* Writes to an eventfd whenever the bell has rung since `seen`, until *stop is set and the bell rung once
 * more. Blocks; a thread of its own. */
static inline void hub_relay(control_header *control, uint32_t seen, shm_u64 *stop, int event) {
    while (!load_relaxed64(stop)) {
        futex_wait(&control->doorbell, seen, HUB_TICK_NS);
        uint32_t now = load_seq32(&control->doorbell); /* SYNC(bell) */
        if (now == seen) continue;
        seen = now;
        eventfd_write(event, 1);
    }
}

#endif
