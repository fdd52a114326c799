/* Bytes into a claimed extent, and how warm that extent still is.
 *
 * A lane that its reader keeps up with goes round in a few megabytes, which stay in the cache: a plain copy
 * is best, and the reader finds the bytes there. An extent that comes again only after more than half of the
 * last-level cache was written has left it: a plain store would first fetch what it overwrites, one past the
 * cache does not (measured: bench/README.md, "How far memory goes round"). Such stores are not ordered by a
 * release store on x86: lane_copies_done stands between them and the commit. Private to the producer; a wrong
 * guess costs time, nothing else.
 */
#ifndef SHMBRIDGE_LANE_COPY_H
#define SHMBRIDGE_LANE_COPY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"

#define WARMTH_PAGE 4096u
#define SHORTEST_STREAM 2048u

typedef struct {
    /* per page of the data area: pages claimed in all when it was claimed last, 0: never */
    uint32_t *written;
    uint32_t pages;    /* claimed in all, plus one */
    uint32_t far_off;  /* pages after which one has left the cache */
} extent_warmth;

/* 0, or -1: no memory. */
static inline int warmth_open(extent_warmth *warmth, uint64_t data_bytes) {
    warmth->pages = 1;
    warmth->far_off = (uint32_t)(cache_bytes(3, 32 << 20) / 2 / WARMTH_PAGE);
    warmth->written = calloc(data_bytes / WARMTH_PAGE + 1, sizeof(uint32_t));
    return warmth->written ? 0 : -1;
}

static inline void warmth_close(extent_warmth *warmth) { free(warmth->written); }

/* Notes that this extent is about to be written; whether it has left the cache since it was last. */
static inline int warmth_claim(extent_warmth *warmth, uint64_t at, uint64_t bytes) {
    uint64_t first = at / WARMTH_PAGE, last = (at + bytes) / WARMTH_PAGE;
    int is_cold = warmth->written[first] == 0 || warmth->pages - warmth->written[first] > warmth->far_off;
    for (uint64_t page = first; page <= last; page++) warmth->written[page] = warmth->pages;
    warmth->pages += (uint32_t)(last - first + 1);
    return is_cold;
}

#if defined(__SSE2__)
#include <emmintrin.h>

static inline void copy_past_cache(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    uint64_t head = -(uintptr_t)to & 63;
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c), _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, bytes);
}

/* Everything copied is ordered before the commit that follows. */
static inline void lane_copies_done(int is_cold) {
    if (is_cold) _mm_sfence();
}
#else
#define copy_past_cache memcpy
static inline void lane_copies_done(int is_cold) { (void)is_cold; }
#endif

static inline void lane_copy(void *to, const void *from, uint64_t bytes, int is_cold) {
    if (is_cold && bytes >= SHORTEST_STREAM) copy_past_cache(to, from, bytes);
    else memcpy(to, from, bytes);
}

#endif
