/* How long records waited for the hub: counted in powers of two, by the hub alone, for observers. */
#ifndef SHMBRIDGE_LATENCY_H
#define SHMBRIDGE_LATENCY_H

#include "layout.h"

/* Number i counts what took less than 2^i microseconds; the last one, everything longer. */
static inline uint32_t latency_bucket(int64_t took_ns) {
    uint64_t us = took_ns > 0 ? (uint64_t)took_ns / 1000u : 0;
    uint32_t bits = us ? 64u - (uint32_t)__builtin_clzll(us) : 0;
    return bits < LATENCY_BUCKETS ? bits : LATENCY_BUCKETS - 1u;
}

/* Counts one record. One writer, the hub under the GIL: relaxed words without a partner. */
static inline void latency_count(control_header *control, int64_t took_ns) {
    shm_u64 *count = &control->latency_counts[latency_bucket(took_ns)];
    store_relaxed64(count, load_relaxed64(count) + 1);
    store_relaxed64(&control->latency_ns_total,
                    load_relaxed64(&control->latency_ns_total) + (took_ns > 0 ? (uint64_t)took_ns : 0));
}

#endif
