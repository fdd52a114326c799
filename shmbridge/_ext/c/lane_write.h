/* The producer's side of one lane: claim, commit, abort, wait for space.
 * docs/adr/0001-lanes.md says why it is right.
 *
 * Plain C, so that the same lines run under ThreadSanitizer and in a harness; lane_writer.pxi binds it. One
 * thread at a time. Everything in lane_writer is private to the process: what dies with it needs no repair.
 */
#ifndef SHMBRIDGE_LANE_WRITE_H
#define SHMBRIDGE_LANE_WRITE_H

#include <stdlib.h>

#include "extents.h"
#include "faults.h"
#include "futex.h"
#include "lane_copy.h"
#include "geometry.h"
#include "spin.h"

#define PRODUCER_TICK_NS 50000000
#define OWN_CACHES_ROUND 4 /* measured: bench/README.md, "How far memory goes round" */
#define RECORDS_IN_CACHE 4     /* one is read, one is ready, one is written, one to spare */
#define PATIENT_BYTES_PER_NS 8 /* the larger a record, the longer its reader may take */

/* What a producer knows of a slot, whatever its shared words say by now:
 * they may have been scribbled over. */
typedef struct {
    uint64_t generation;
    interval extent;
} own_slot;

/* A committed record whose release would make room. */
typedef struct {
    uint64_t generation;
    uint32_t index;
} awaited;

typedef struct {
    lane_header *header;
    control_header *hub;
    uint32_t *ring;
    slot *slots;
    shm_u64 *released;
    uint8_t *data;
    uint32_t slot_count;
    uint64_t data_bytes;
    own_slot *own;          /* one per slot */
    uint64_t tail;          /* the value of the shared tail: no other process stores it */
    uint64_t origin_newest; /* + 1, of the last record at its origin; 0: this lane's records have none */
    uint32_t *free_slots;   /* a stack */
    uint32_t free_slot_count;
    uint32_t *outstanding;  /* a ring: slots of committed records not yet taken back, in order of commit */
    uint32_t outstanding_at, outstanding_count;
    uint64_t outstanding_bytes;
    interval *free_extents;
    uint32_t free_extent_count;
    uint64_t cursor, window; /* extents.h */
    uint64_t shared_cache;  /* bytes of the cache that cores share */
    int was_released;       /* since it last waited for a release to keep pace */
    uint32_t waits_in_vain; /* one after another */
    uint32_t unpaced_puts;  /* without a further such wait */
    int64_t claimed;        /* slot of the open claim, -1: none */
    uint64_t claim_at, claim_bytes;
    uint64_t claim_number;  /* of the open claim, or of the last one: from 1, never twice */
    int claim_is_cold;      /* its extent has left the cache since it was last written */
    extent_warmth warmth;
    int64_t spin_ns;        /* how long to look for room before sleeping */
    /* the words that a thread waiting for room looks at, also while another thread puts */
    awaited *awaited;
    uint32_t awaited_count;
    /* the bell, before the thread that may sleep looked at anything; a lane begins with 0 */
    uint32_t heard;
} lane_writer;

/* For a lane that was formatted just now and has never been written to. 0, or -1: no memory. */
static inline int lane_writer_open(lane_writer *writer, uint8_t *base, const lane_geometry *geometry,
                                   control_header *hub) {
    *writer = (lane_writer){.header = (lane_header *)base, .hub = hub, .claimed = -1};
    writer->spin_ns = LONGEST_SPIN_NS;
    writer->origin_newest = load_relaxed64(&writer->header->origin_newest[1]);
    writer->slot_count = geometry->slot_count, writer->data_bytes = geometry->data_bytes;
    writer->ring = (uint32_t *)(base + geometry->ring_at);
    writer->slots = (slot *)(base + geometry->slots_at);
    writer->released = (shm_u64 *)(base + geometry->released_at);
    writer->data = base + geometry->data_at;
    writer->own = calloc(geometry->slot_count, sizeof(own_slot));
    writer->free_slots = malloc(geometry->slot_count * sizeof(uint32_t));
    writer->outstanding = malloc(geometry->slot_count * sizeof(uint32_t));
    writer->awaited = malloc(geometry->slot_count * sizeof(awaited));
    writer->free_extents = malloc((geometry->slot_count + 2ull) * sizeof(interval));
    if (!writer->own || !writer->free_slots || !writer->outstanding || !writer->free_extents ||
        !writer->awaited || warmth_open(&writer->warmth, geometry->data_bytes))
        return -1;
    for (uint32_t i = 0; i < geometry->slot_count; i++) writer->free_slots[i] = geometry->slot_count - 1 - i;
    writer->free_slot_count = geometry->slot_count;
    writer->free_extents[0] = (interval){0, geometry->data_bytes};
    writer->free_extent_count = 1;
    writer->window = OWN_CACHES_ROUND * cache_bytes(2, 1 << 20);
    writer->shared_cache = cache_bytes(3, 32 << 20);
    return 0;
}

static inline void lane_writer_close(lane_writer *writer) {
    free(writer->own), free(writer->free_slots), free(writer->outstanding), free(writer->awaited);
    free(writer->free_extents);
    warmth_close(&writer->warmth);
    *writer = (lane_writer){.claimed = -1};
}

/* The i-th slot in order of commit that has not been taken back. */
static inline uint32_t lane_outstanding(const lane_writer *writer, uint32_t i) {
    return writer->outstanding[(writer->outstanding_at + i) & (writer->slot_count - 1)];
}

static inline int lane_is_released(const lane_writer *writer, uint32_t index) {
    /* SYNC(release): after this the readers' loads of the extent are over, so it may be written again. */
    return load_seq64(&writer->released[index]) == writer->own[index].generation;
}

static inline void lane_take_back(lane_writer *writer, uint32_t index) {
    extent_give(writer->free_extents, &writer->free_extent_count, writer->own[index].extent.at,
                writer->own[index].extent.bytes);
    writer->free_slots[writer->free_slot_count++] = index;
    writer->outstanding_bytes -= writer->own[index].extent.bytes;
    writer->was_released = 1;
}

/* Takes released slots back: the oldest ones while they are released, or, thoroughly,
 * by one pass over all. */
static inline void lane_reclaim(lane_writer *writer, int thoroughly) {
    uint32_t mask = writer->slot_count - 1, kept = 0;
    while (writer->outstanding_count && lane_is_released(writer, lane_outstanding(writer, 0))) {
        lane_take_back(writer, lane_outstanding(writer, 0));
        writer->outstanding_at++, writer->outstanding_count--;
    }
    if (!thoroughly) return;
    for (uint32_t i = 0; i < writer->outstanding_count; i++) {
        uint32_t index = lane_outstanding(writer, i);
        if (lane_is_released(writer, index)) lane_take_back(writer, index);
        else writer->outstanding[(writer->outstanding_at + kept++) & mask] = index;
    }
    writer->outstanding_count = kept;
}

/* Before a claim, for a thread that may wait a moment: a writer that is far ahead waits for its reader, whose every
 * record would otherwise come from memory instead of the cache that both share. The reader is the slower one then,
 * and sets the pace anyway: what the wait costs, a full lane would cost later. It ends with enough releases, and
 * soon in any case; each in vain makes the next one twice as rare, and none follows before something was released.
 *
 * Only looks: whoever dies here has touched nothing that another process uses. docs/adr/0018-pace.md. */
static inline void lane_keep_pace(lane_writer *writer, uint64_t bytes) {
    uint64_t several = RECORDS_IN_CACHE * bytes, warm = several > writer->window ? several : writer->window;
    lane_header *header = writer->header;
    int64_t began, now, longest = LONGEST_SPIN_NS + (int64_t)(bytes / PATIENT_BYTES_PER_NS);
    if (writer->outstanding_bytes + bytes <= warm) return;
    lane_reclaim(writer, 0);
    if (!writer->was_released || several > writer->shared_cache / 2 || writer->unpaced_puts) {
        writer->unpaced_puts -= writer->unpaced_puts > 0;
        return;
    }
    writer->was_released = 0; /* until lane_reclaim takes something back */
    for (began = now = monotonic_ns(); writer->outstanding_bytes + bytes > warm && now - began < longest;) {
        cpu_relax();
        lane_reclaim(writer, 0);
        now = monotonic_ns();
    }
    store_relaxed64(&header->wait_ns_total, load_relaxed64(&header->wait_ns_total) + (uint64_t)(now - began));
    if (writer->was_released) writer->waits_in_vain = 0;
    else writer->unpaced_puts = 1u << (writer->waits_in_vain += writer->waits_in_vain < 10);
}

/* Reserves a slot and `bytes` of the data area, whole lines. 1, or 0 if there is no room now;
 * touches nothing that others believe. */
static inline int lane_claim(lane_writer *writer, uint64_t bytes) {
    uint64_t at = UINT64_MAX;
    bytes = up_to(bytes, ALIGNMENT);
    for (int thoroughly = 0; at == UINT64_MAX && thoroughly < 2; thoroughly++) {
        lane_reclaim(writer, thoroughly);
        if (writer->free_slot_count)
            at = extent_take(writer->free_extents, &writer->free_extent_count, bytes, &writer->cursor,
                             writer->window);
    }
    if (at == UINT64_MAX) {
        store_relaxed64(&writer->header->wanted_bytes, bytes);
        return 0;
    }
    if (load_relaxed64(&writer->header->wanted_bytes)) store_relaxed64(&writer->header->wanted_bytes, 0);
    writer->claimed = writer->free_slots[--writer->free_slot_count];
    writer->claim_at = at, writer->claim_bytes = bytes, writer->claim_number++;
    writer->claim_is_cold = warmth_claim(&writer->warmth, at, bytes);
    fault_hit("producer.claimed");
    return 1;
}

/* Gives the open claim back; no shared word has been touched. */
static inline void lane_abort(lane_writer *writer) {
    extent_give(writer->free_extents, &writer->free_extent_count, writer->claim_at, writer->claim_bytes);
    writer->free_slots[writer->free_slot_count++] = (uint32_t)writer->claimed;
    writer->claimed = -1;
}

/* Publishes the open claim under what `stamp` says of it; generation, sequence,
 * extent and publish time are set here. Its sequence. */
static inline uint64_t lane_commit(lane_writer *writer, const slot *stamp) {
    uint32_t index = (uint32_t)writer->claimed, mask = writer->slot_count - 1;
    uint64_t sequence = writer->tail;
    lane_header *header = writer->header;
    slot *body = &writer->slots[index];
    own_slot *own = &writer->own[index];
    own->extent = (interval){writer->claim_at, writer->claim_bytes};
    fault_hit("producer.payload_written");
    body->sequence = sequence;
    body->extent_at = writer->claim_at, body->extent_bytes = writer->claim_bytes;
    body->min_policy_version = stamp->min_policy_version;
    body->max_policy_version = stamp->max_policy_version;
    body->t_created_ns = stamp->t_created_ns, body->t_publish_ns = monotonic_ns();
    body->tokens = stamp->tokens, body->rows = stamp->rows, body->columns = stamp->columns;
    body->group_size = stamp->group_size, body->env_id = stamp->env_id;
    body->group_id_bytes = stamp->group_id_bytes, body->flags = stamp->flags;
    body->index_bytes = stamp->index_bytes;
    body->origin_sequence = stamp->origin_sequence;
    body->origin_waited_ns = stamp->origin_waited_ns, body->origin_transfer_ns = stamp->origin_transfer_ns;
    fault_hit("producer.body_written");
    store_release64(&body->generation, ++own->generation); /* SYNC(slot-body) */
    fault_hit("producer.generation_stored");
    writer->ring[sequence & mask] = index;
    fault_hit("producer.ring_written");
    writer->outstanding[(writer->outstanding_at + writer->outstanding_count++) & mask] = index;
    writer->outstanding_bytes += writer->claim_bytes;
    writer->claimed = -1;
    writer->tail = sequence + 1;
    store_relaxed64(&header->bytes_total, load_relaxed64(&header->bytes_total) + writer->claim_bytes);
    store_relaxed64(&header->tokens_total, load_relaxed64(&header->tokens_total) + stamp->tokens);
    if (stamp->origin_sequence) writer->origin_newest = stamp->origin_sequence;
    if (writer->origin_newest) {
        /* not before the earlier tail: a reader that sees it sees that there was another record */
        store_release64(&header->origin_newest[sequence & 1], writer->origin_newest); /* SYNC(origin-newest) */
        fault_hit("producer.origin_noted");
    }
    fault_hit("producer.before_tail");
    store_seq64(&header->tail, sequence + 1); /* SYNC(commit), SYNC(hub-wake) */
    fault_hit("producer.committed");
    if (load_seq32(&writer->hub->hub_sleeping)) { /* SYNC(hub-wake) */
        ring_bell(&writer->hub->doorbell);
    }
    fault_hit("producer.woken_hub");
    return sequence;
}

/* Notes what is outstanding now, before a wait for space. For the producer's thread, or, with its lock held,
 * for the one that sleeps. */
static inline void lane_note_outstanding(lane_writer *writer) {
    writer->awaited_count = writer->outstanding_count;
    for (uint32_t i = 0; i < writer->awaited_count; i++) {
        uint32_t index = lane_outstanding(writer, i);
        writer->awaited[i].index = index, writer->awaited[i].generation = writer->own[index].generation;
    }
}

static inline int lane_anything_released(const lane_writer *writer) {
    for (uint32_t i = 0; i < writer->awaited_count; i++)
        /* SYNC(space-wake) */
        if (load_seq64(&writer->released[writer->awaited[i].index]) >= writer->awaited[i].generation)
            return 1;
    return 0;
}

/* Looks for a while whether something was released; a reader
 * that keeps up does that before any thread falls asleep. */
static inline int lane_spin_for_space(lane_writer *writer, int64_t began, int64_t timeout_ns) {
    int64_t until = began + (writer->spin_ns < timeout_ns ? writer->spin_ns : timeout_ns);
    int released = lane_anything_released(writer);
    while (!released && monotonic_ns() < until) {
        cpu_relax();
        released = lane_anything_released(writer);
    }
    spin_learn(&writer->spin_ns, released);
    return released;
}

/* Spins, then sleeps until something noted was released, the bell has rung since the last wait,
 * or the timeout is over. Nanoseconds. */
static inline int64_t lane_wait_space(lane_writer *writer, int64_t timeout_ns) {
    lane_header *header = writer->header;
    int64_t began = monotonic_ns(), left;
    uint32_t seen;
    int status = 0;
    if (lane_spin_for_space(writer, began, timeout_ns)) return monotonic_ns() - began;
    left = timeout_ns - (monotonic_ns() - began);
    if (left <= 0) return timeout_ns;
    seen = load_seq32(&header->space_bell);  /* SYNC(bell) */
    if (seen != writer->heard) {
        writer->heard = seen;
        return monotonic_ns() - began;
    }
    store_seq32(&header->space_waiting, 1);  /* SYNC(space-wake) */
    fault_hit("producer.waiting");
    if (!lane_anything_released(writer))
        do { /* a hub may die between release and wake: every tick one looks for oneself */
            status = futex_wait(&header->space_bell, seen, left < PRODUCER_TICK_NS ? left : PRODUCER_TICK_NS);
            left = timeout_ns - (monotonic_ns() - began);
        } while (status == ETIMEDOUT && left > 0 && !lane_anything_released(writer));
    store_seq32(&header->space_waiting, 0);
    if (status == ETIMEDOUT && load_seq32(&header->space_bell) == seen && /* SYNC(bell) */
        lane_anything_released(writer))
        store_relaxed64(&header->late_wakes_total, load_relaxed64(&header->late_wakes_total) + 1);
    writer->heard = load_seq32(&header->space_bell); /* SYNC(bell) */
    return monotonic_ns() - began;
}

/* Bytes of the data area that no committed, un-released record has. */
static inline uint64_t lane_free_bytes(const lane_writer *writer) {
    uint64_t used = 0;
    for (uint32_t i = 0; i < writer->outstanding_count; i++)
        if (!lane_is_released(writer, lane_outstanding(writer, i)))
            used += writer->own[lane_outstanding(writer, i)].extent.bytes;
    return writer->data_bytes - used;
}

/* Committed and un-released records. */
static inline uint32_t lane_unreleased(const lane_writer *writer) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < writer->outstanding_count; i++)
        count += !lane_is_released(writer, lane_outstanding(writer, i));
    return count;
}

#endif
