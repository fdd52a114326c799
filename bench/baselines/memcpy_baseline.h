/* The limit: what two processes move through shared memory when nothing but the bytes is done.
 *
 * Slots of one record in a lane of a given size: one memcpy in, a flag, one read of every byte as a sum of
 * 8-byte words, the flag back. It spins and never sleeps, checks nothing and keeps no books. Knows nothing of
 * the ring; called by memcpy_baseline.pyx, for measurements alone. What if a process dies here? The other sees no
 * progress, and gives up when its patience ends.
 */
#ifndef SHMBRIDGE_MEMCPY_BASELINE_H
#define SHMBRIDGE_MEMCPY_BASELINE_H

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "atomics.h"
#include "lane_copy.h"

#define BASELINE_LINE 128u
#define WORDS_AT_ONCE 8u /* a cache line */

typedef struct {
    /* writer: 1 after the record is there; reader: 0 after it has read it */
    _Alignas(BASELINE_LINE) shm_u64 full;
} baseline_flag;

typedef struct {
    baseline_flag *flags; /* [slots] */
    uint8_t *data;    /* [slots][record] */
    uint64_t slots, record, position;
    int past_cache; /* writer: stores past the cache, to see where they win */
} baseline;

typedef uint64_t __attribute__((aligned(1), may_alias)) any_word;

/* Reads every byte: the sum of all 8-byte words, and of the bytes after the last whole one. One copy of it, since the
 * copies that a compiler inlines differ in speed by a factor of two, and with them the contenders that take one or the other. */
__attribute__((noinline)) static uint64_t sum_of_words(const uint8_t *bytes, uint64_t count) {
    const any_word *words = (const any_word *)bytes;
    uint64_t sums[WORDS_AT_ONCE] = {0}, whole = count / 8, sum = 0, i = 0;
    for (; i + WORDS_AT_ONCE <= whole; i += WORDS_AT_ONCE)
        for (unsigned k = 0; k < WORDS_AT_ONCE; k++) sums[k] += words[i + k];
    for (; i < whole; i++) sum += words[i];
    for (i = whole * 8; i < count; i++) sum += bytes[i];
    for (unsigned k = 0; k < WORDS_AT_ONCE; k++) sum += sums[k];
    return sum;
}

static inline double baseline_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Spins until the flag has this value; 0 if patience_s pass. Yields now and then:
 * two sides may share a core. */
static inline int baseline_wait(const shm_u64 *flag, uint64_t value, double patience_s) {
    double deadline = 0;
    for (unsigned spins = 1; load_acquire64(flag) != value; spins++) { /* SYNC(baseline-full) */
        cpu_relax();
        if (spins % 20000) continue;
        sched_yield();
        if (deadline == 0) deadline = baseline_now() + patience_s;
        if (baseline_now() > deadline) return 0;
    }
    return 1;
}

/* Moves `count` records in, from `sources` records in turn; how many got there. */
static inline uint64_t baseline_write(baseline *it, const uint8_t *source, uint64_t sources, uint64_t count,
                                  double patience_s) {
    for (uint64_t n = 0; n < count; n++, it->position++) {
        const uint64_t slot = it->position % it->slots;
        if (!baseline_wait(&it->flags[slot].full, 0, patience_s)) return n;
        lane_copy(it->data + slot * it->record, source + (n % sources) * it->record, it->record,
                  it->past_cache);
        lane_copies_done(it->past_cache);
        store_release64(&it->flags[slot].full, 1); /* SYNC(baseline-full) */
    }
    return count;
}

/* Reads `count` records; how many came, and the sum of their words. */
static inline uint64_t baseline_read(baseline *it, uint64_t count, double patience_s, uint64_t *sum) {
    for (uint64_t n = 0; n < count; n++, it->position++) {
        const uint64_t slot = it->position % it->slots;
        if (!baseline_wait(&it->flags[slot].full, 1, patience_s)) return n;
        *sum += sum_of_words(it->data + slot * it->record, it->record);
        store_release64(&it->flags[slot].full, 0); /* SYNC(baseline-full) */
    }
    return count;
}

#endif
