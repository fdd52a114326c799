/* An observer's side of one lane: which records can be copied, and whether a copy is whole. Writes nothing.
 *
 * An observer holds no record back, so any may be released while it is copied. Slot and extent change only
 * after a release, and a release is one word that only rises: a copy is whole if that word had not risen
 * once all of it was read.
 */
#ifndef SHMBRIDGE_LANE_OBSERVE_H
#define SHMBRIDGE_LANE_OBSERVE_H

#include "lane_read.h"

/* Whether what was read of a record until now was read before its release. */
static inline int lane_is_unreleased(const lane_reader *reader, const lane_found *found) {
    reads_before_next_load();
    /* SYNC(release): each use of a slot adds one to both words, and is released before the next */
    return load_acquire64(&reader->released[found->index]) == found->generation - 1;
}

/* The next record to copy, 0 if none is committed. Adds to `missed` those whose ring entries are gone. */
static inline int lane_observe_next(lane_reader *reader, uint64_t *sequence, uint32_t *index,
                                    uint64_t *missed) {
    uint64_t tail = load_acquire64(&reader->header->tail); /* SYNC(commit) */
    uint64_t count = reader->geometry.slot_count;
    if (tail <= reader->next) return 0;
    if (tail - reader->next > count) {
        *missed += tail - count - reader->next;
        reader->next = tail - count;
    }
    *sequence = reader->next++;
    *index = reader->ring[*sequence & (count - 1)];
    return 1;
}

/* The un-released records below `tail`, newest first, at most `slot_count` entries; how many. */
static inline uint32_t lane_observe_held(const lane_reader *reader, uint64_t tail, lane_entry *entries) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < reader->geometry.slot_count; i++) {
        uint64_t generation = load_acquire64(&reader->slots[i].generation); /* SYNC(slot-body) */
        uint64_t sequence = reader->slots[i].sequence;
        /* SYNC(release) */
        if (generation != load_acquire64(&reader->released[i]) && sequence < tail)
            entries[count++] = (lane_entry){sequence, i, 0};
    }
    qsort(entries, count, sizeof(lane_entry), lane_newest_first);
    return count;
}

#endif
