/* The reader's side of one lane: adopt, take, release. docs/adr/0001-lanes.md says why it is right.
 *
 * Plain C, so that the same lines run under sanitizers and fuzzers; lane_reader.pxi binds it. For the holder
 * of the hub lock; a learner rank uses only lane_reader_open and lane_look. Whatever is used as an index is
 * copied to private memory first and checked there.
 */
#ifndef SHMBRIDGE_LANE_READ_H
#define SHMBRIDGE_LANE_READ_H

#include <stdlib.h>
#include <string.h>

#include "faults.h"
#include "futex.h"
#include "index.h"

typedef struct {
    uint64_t sequence;
    uint32_t index;
    uint32_t again; /* this hub has handed it out, and it was looked at */
} lane_entry;

typedef struct {
    lane_header *header;
    const uint32_t *ring;
    const slot *slots;
    shm_u64 *released;
    const uint8_t *data;
    lane_geometry geometry;
    column_def *columns;   /* private copy, geometry.column_count of them */
    uint32_t tokens;       /* number of the column that every record has */
    uint64_t next;         /* sequence to take from the ring */
    uint64_t first_head;   /* head as the predecessor left it */
    /* before the ring goes on: un-released when this hub came, or put back since; newest first */
    lane_entry *backlog;
    lane_entry *dropped;   /* looked at, un-released, and their leases are gone; oldest loss first */
    uint32_t backlog_count, dropped_count;
} lane_reader;

/* A record found, not yet handed out: private copies. */
typedef struct {
    slot body;
    uint64_t generation;
    uint32_t index;
    int from_backlog, again;
} lane_found;

static inline void lane_reader_close(lane_reader *reader) {
    free(reader->columns), free(reader->backlog), free(reader->dropped);
    reader->columns = NULL, reader->backlog = reader->dropped = NULL;
}

/* Reads a lane's geometry and columns. 0, or -1 and why; an empty complaint means no memory. */
static inline int lane_reader_open(lane_reader *reader, uint8_t *base, uint64_t size, complaint *why) {
    *reader = (lane_reader){.header = (lane_header *)base};
    why->text[0] = 0;
    /* SYNC(lane-ready) */
    if (size < sizeof(lane_header) || load_acquire64(&reader->header->magic) != LANE_MAGIC)
        return complain(why, "no lane");
    if (geometry_read(reader->header, size, &reader->geometry, why)) return -1;
    reader->ring = (const uint32_t *)(base + reader->geometry.ring_at);
    reader->slots = (const slot *)(base + reader->geometry.slots_at);
    reader->released = (shm_u64 *)(base + reader->geometry.released_at);
    reader->data = base + reader->geometry.data_at;
    reader->columns = malloc(reader->geometry.column_count * sizeof(column_def) + 1);
    if (!reader->columns) return -1;
    memcpy(reader->columns, base + PAGE, reader->geometry.column_count * sizeof(column_def));
    reader->tokens = index_tokens(reader->columns, reader->geometry.column_count);
    return 0;
}

static inline int lane_newest_first(const void *one, const void *other) {
    uint64_t a = ((const lane_entry *)one)->sequence, b = ((const lane_entry *)other)->sequence;
    return (a < b) - (a > b);
}

/* A predecessor died between a release and its count: counts it. Under the hub lock. Nothing else is mended:
 * another difference is a fault. */
static inline void lane_finish_release(lane_reader *reader) {
    lane_header *header = reader->header;
    uint64_t releasing = load_acquire64(&header->releasing); /* SYNC(release-count) */
    uint64_t count = releasing >> RELEASING_SLOT_BITS, index = releasing & (MOST_SLOTS - 1);
    if (count != load_relaxed64(&header->released_total) + 1 || index >= reader->geometry.slot_count) return;
    if (load_relaxed64(&reader->released[index]) == load_relaxed64(&header->releasing_generation))
        store_relaxed64(&header->released_total, count);
}

/* Finds what is committed and un-released: tail first, then the slots. 0, or -1 and why;
 * an empty complaint means no memory.
 *
 * A slot at or beyond that tail was, or is being, committed after that load.
 * One beyond a tail loaded after it cannot be.
 */
static inline int lane_adopt(lane_reader *reader, complaint *why) {
    uint64_t tail = load_seq64(&reader->header->tail), newest = 0; /* SYNC(commit) */
    uint32_t count = reader->geometry.slot_count;
    why->text[0] = 0;
    lane_finish_release(reader);
    reader->backlog = malloc(count * sizeof(lane_entry));
    reader->dropped = malloc(count * sizeof(lane_entry));
    if (!reader->backlog || !reader->dropped) return -1;
    fault_hit("hub.adopting");
    for (uint32_t i = 0; i < count; i++) {
        uint64_t generation = load_acquire64(&reader->slots[i].generation), sequence; /* SYNC(slot-body) */
        if (generation == load_relaxed64(&reader->released[i])) continue;
        sequence = reader->slots[i].sequence;
        if (sequence < tail) reader->backlog[reader->backlog_count++] = (lane_entry){sequence, i, 0};
        if (sequence > newest) newest = sequence;
    }
    if (newest > load_acquire64(&reader->header->tail)) /* SYNC(commit) */
        return complain(why, "a slot says record %" PRIu64 ", the lane has %" PRIu64, newest,
                        load_acquire64(&reader->header->tail)); /* SYNC(commit) */
    qsort(reader->backlog, reader->backlog_count, sizeof(lane_entry), lane_newest_first);
    for (uint32_t i = 1; i < reader->backlog_count; i++)
        if (reader->backlog[i].sequence == reader->backlog[i - 1].sequence)
            return complain(why, "slots %u and %u both say record %" PRIu64, reader->backlog[i].index,
                            reader->backlog[i - 1].index, reader->backlog[i].sequence);
    reader->next = tail;
    /* Ordered by the hub lock that changed hands. */
    reader->first_head = load_relaxed64(&reader->header->head); /* SYNC(hand-out) */
    store_relaxed64(&reader->header->leases_dropped, 0);        /* of this hub: an earlier one's come again */
    return 0;
}

/* Copies and checks what slot `index` holds, which must be `sequence`. 0, or -1 and why. */
static inline int lane_look(const lane_reader *reader, uint32_t index, uint64_t sequence, lane_found *found,
                            complaint *why) {
    const slot *body = &found->body;
    uint64_t data = reader->geometry.data_bytes;
    if (index >= reader->geometry.slot_count)
        return complain(why, "record %" PRIu64 " is said to be in slot %u of %u", sequence, index,
                        reader->geometry.slot_count);
    found->index = index;
    found->generation = load_acquire64(&reader->slots[index].generation); /* SYNC(slot-body) */
    memcpy(&found->body, &reader->slots[index], sizeof(slot));
    copied();
    if (body->sequence != sequence || found->generation == load_relaxed64(&reader->released[index]))
        return complain(why,
                        "slot %u holds record %" PRIu64 ", generation %" PRIu64
                        ", not an un-released record %" PRIu64,
                        index, body->sequence, found->generation, sequence);
    if (body->extent_at % ALIGNMENT || body->extent_bytes % ALIGNMENT || body->extent_at > data ||
        body->extent_bytes > data - body->extent_at || body->index_bytes > body->extent_bytes)
        return complain(
            why, "slot %u: extent %" PRIu64 "+%" PRIu64 " (index %u) is not inside %" PRIu64 " data bytes",
            index, body->extent_at, body->extent_bytes, body->index_bytes, data);
    return 0;
}

/* The next record, from the backlog or the ring. 1, 0 if there is none, or -1 and why.
 * Moves nothing: see lane_hand_out. */
static inline int lane_next(const lane_reader *reader, lane_found *found, complaint *why) {
    uint64_t tail, next = reader->next;
    uint32_t index;
    found->from_backlog = reader->backlog_count > 0, found->again = 0;
    if (found->from_backlog) {
        lane_entry oldest = reader->backlog[reader->backlog_count - 1];
        found->again = oldest.again != 0;
        return lane_look(reader, oldest.index, oldest.sequence, found, why) ? -1 : 1;
    }
    tail = load_acquire64(&reader->header->tail); /* SYNC(commit) */
    if (tail == next) return 0;
    if (tail - next > reader->geometry.slot_count)
        return complain(why, "tail %" PRIu64 " is %" PRIu64 " past %" PRIu64 ", more than %u slots", tail,
                        tail - next, next, reader->geometry.slot_count);
    index = reader->ring[next & (reader->geometry.slot_count - 1)];
    return lane_look(reader, index, next, found, why) ? -1 : 1;
}

/* Takes a record out of the backlog: the oldest, unless an older one was put back since it was found. */
static inline void lane_leave_backlog(lane_reader *reader, uint64_t sequence) {
    uint32_t place = reader->backlog_count;
    while (place > 0 && reader->backlog[place - 1].sequence != sequence) place--;
    if (!place) return;
    for (reader->backlog_count--; place <= reader->backlog_count; place++)
        reader->backlog[place - 1] = reader->backlog[place];
}

/* A record that was handed out and not released waits again, in the order of commit. */
static inline void lane_put_back(lane_reader *reader, uint64_t sequence, uint32_t index, int again) {
    uint32_t place = reader->backlog_count;
    /* a lane that names a slot twice; the record stays un-released */
    if (place >= reader->geometry.slot_count) return;
    for (; place > 0 && reader->backlog[place - 1].sequence < sequence; place--)
        reader->backlog[place] = reader->backlog[place - 1];
    reader->backlog[place] = (lane_entry){sequence, index, again != 0};
    reader->backlog_count++;
}

static inline void lane_note_dropped(lane_reader *reader) {
    store_relaxed64(&reader->header->leases_dropped, reader->dropped_count); /* H, for messages */
}

/* A record that was looked at is not released, and no lease holds it any more. */
static inline void lane_drop(lane_reader *reader, uint64_t sequence, uint32_t index) {
    if (reader->dropped_count >= reader->geometry.slot_count) return; /* as in lane_put_back */
    reader->dropped[reader->dropped_count++] = (lane_entry){sequence, index, 1};
    lane_note_dropped(reader);
}

/* What was dropped waits again; how many records that are. */
static inline uint32_t lane_readmit(lane_reader *reader) {
    uint32_t count = reader->dropped_count;
    while (reader->dropped_count > 0) {
        lane_entry last = reader->dropped[--reader->dropped_count];
        lane_put_back(reader, last.sequence, last.index, 1);
    }
    lane_note_dropped(reader);
    return count;
}

/* A found record is about to leave: stores head first. Whether it may have been handed out,
 * and looked at, before. */
static inline int lane_hand_out(lane_reader *reader, const lane_found *found) {
    uint64_t sequence = found->body.sequence;
    if (found->from_backlog) lane_leave_backlog(reader, sequence);
    else reader->next = sequence + 1;
    fault_hit("hub.read");
    if (sequence >= load_relaxed64(&reader->header->head)) /* SYNC(hand-out) */
        store_release64(&reader->header->head, sequence + 1); /* SYNC(hand-out) */
    fault_hit("hub.marked");
    return found->again || (found->from_backlog && sequence < reader->first_head);
}

/* Slot and extent may be used again. Idempotent until they are: a second release of a generation changes and
 * counts nothing. One thread at a time: Python holds the GIL.
 *
 * What is about to be counted is said first, so that a successor
 * knows whether a killed hub had released and not yet counted.
 */
static inline void lane_release(lane_reader *reader, uint32_t index, uint64_t generation) {
    lane_header *header = reader->header;
    uint64_t count = load_relaxed64(&header->released_total) + 1;
    if (load_relaxed64(&reader->released[index]) == generation) return;
    store_relaxed64(&header->releasing_generation, generation);
    store_release64(&header->releasing, count << RELEASING_SLOT_BITS | index); /* SYNC(release-count) */
    fault_hit("hub.releasing");
    store_seq64(&reader->released[index], generation); /* SYNC(release), SYNC(space-wake) */
    fault_hit("hub.released");
    store_relaxed64(&header->released_total, count);
    if (load_seq32(&reader->header->space_waiting)) { /* SYNC(space-wake) */
        ring_bell(&reader->header->space_bell);
    }
}

/* Records that can be taken now. */
static inline uint64_t lane_waiting(const lane_reader *reader) {
    return reader->backlog_count + load_acquire64(&reader->header->tail) - reader->next; /* SYNC(commit) */
}

/* Committed, un-released records, where they were when the lane was opened:
 * the header may say anything by now. At most slot_count. */
static inline uint32_t lane_undelivered(const lane_reader *reader) {
    uint64_t tail = load_acquire64(&reader->header->tail); /* SYNC(commit) */
    uint32_t count = 0;
    for (uint32_t i = 0; i < reader->geometry.slot_count; i++) {
        uint64_t generation = load_acquire64(&reader->slots[i].generation); /* SYNC(slot-body) */
        /* SYNC(release) */
        if (generation != load_acquire64(&reader->released[i]) && reader->slots[i].sequence < tail) count++;
    }
    return count;
}

#endif
