/* Arrays of one type into arrays of another, checked. Each function returns -1, or the index of the first
 * value that does not fit. No Python. */
#ifndef SHMBRIDGE_CONVERT_H
#define SHMBRIDGE_CONVERT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lane_copy.h"

#define CHUNK 4096 /* values between two looks whether one was bad */

/* What no value of a column may be. A log-probability may be anything: what is unusual is looked at one by one. */
typedef enum { NOTHING_IS_BAD, NEGATIVE_IS_BAD, NON_FINITE_IS_BAD, UNUSUAL_LOGPROB } badness;

/* A log-probability is above the first and at most the second. NaN is the one mark of "not recorded"; vLLM's
 * -9999, Atropos' 1.0 and the infinities become it. From 0 up to the second it is rounding, and becomes 0. */
#define LOWEST_LOGPROB (-9998.0f)
#define HIGHEST_LOGPROB 1e-3f

static inline float logprob_of(float said) {
    float kept = said > 0.0f ? 0.0f : said;
    return (said > LOWEST_LOGPROB) & (said <= HIGHEST_LOGPROB) ? kept : NAN;
}

/* An exponent of all ones is infinity or NaN. */
#define EXPONENT 0x7f800000

/* Without their sign, the bits of a larger number are larger. These are LOWEST_LOGPROB's. */
#define LARGE_LOGPROB 0x461c3800

static inline int is_bad32(int32_t bits, badness bad) {
    if (bad == UNUSUAL_LOGPROB) return bits > 0 || (bits & INT32_MAX) >= LARGE_LOGPROB;
    return bad == NEGATIVE_IS_BAD ? bits < 0 : (bits & EXPONENT) == EXPONENT;
}

typedef int32_t wide __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__SSE2__)
/* 64 bytes to a whole line, past the cache. */
static inline __attribute__((always_inline)) void store_past_cache(void *to, wide a, wide b) {
    __m128i parts[4];
    memcpy(parts, &a, sizeof a), memcpy(parts + 2, &b, sizeof b);
    for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)to + i, parts[i]);
}
#else
static inline __attribute__((always_inline)) void store_past_cache(void *to, wide a, wide b) {
    ((wide *)to)[0] = a, ((wide *)to)[1] = b;
}
#endif

/* Copies values (`to` NULL: only looks at them) and returns whether one was bad: each is loaded once. Past the
 * cache, `to` is the start of a line. */
static inline __attribute__((always_inline)) int copy_and_look_at(int32_t *to, const int32_t *from, int64_t count,
                                                                  badness bad, int past_cache) {
    wide seen = {0}, bits = {0}; /* or-ed, some below -512 look too large: then all are looked at in vain */
    int32_t any = 0;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const wide *at = (const wide *)(from + i);
        wide a = at[0], b = at[1], c = at[2], d = at[3];
        if (bad == NEGATIVE_IS_BAD) seen |= (a | b) | (c | d);
        else if (bad == UNUSUAL_LOGPROB)
            seen |= ((a > 0) | (b > 0)) | ((c > 0) | (d > 0)), bits |= (a | b) | (c | d);
        else
            seen |= (((a & EXPONENT) == EXPONENT) | ((b & EXPONENT) == EXPONENT)) |
                    (((c & EXPONENT) == EXPONENT) | ((d & EXPONENT) == EXPONENT));
        if (!to) continue;
        if (past_cache) store_past_cache(to + i, a, b), store_past_cache(to + i + 16, c, d);
        else {
            wide *there = (wide *)(to + i);
            there[0] = a, there[1] = b, there[2] = c, there[3] = d;
        }
    }
    for (int k = 0; k < 8; k++) any |= seen[k] | -((bits[k] & INT32_MAX) >= LARGE_LOGPROB);
    any = any < 0;
    for (; i < count; i++) {
        any |= is_bad32(from[i], bad);
        if (to) to[i] = from[i];
    }
    return any;
}

#define COPY_AND_LOOK(name, target)                                                                            \
    static target int name(int32_t *to, const int32_t *from, int64_t count, badness bad, int past_cache) {     \
        if (bad == NEGATIVE_IS_BAD && past_cache) return copy_and_look_at(to, from, count, NEGATIVE_IS_BAD, 1); \
        if (bad == NEGATIVE_IS_BAD) return copy_and_look_at(to, from, count, NEGATIVE_IS_BAD, 0);              \
        if (bad == UNUSUAL_LOGPROB && past_cache) return copy_and_look_at(to, from, count, UNUSUAL_LOGPROB, 1); \
        if (bad == UNUSUAL_LOGPROB) return copy_and_look_at(to, from, count, UNUSUAL_LOGPROB, 0);              \
        if (past_cache) return copy_and_look_at(to, from, count, NON_FINITE_IS_BAD, 1);                        \
        return copy_and_look_at(to, from, count, NON_FINITE_IS_BAD, 0);                                        \
    }
COPY_AND_LOOK(copy_and_look_any, )
#ifdef __x86_64__
COPY_AND_LOOK(copy_and_look_avx2, __attribute__((target("avx2"))))
#define copy_and_look(...) \
    (__builtin_cpu_supports("avx2") ? copy_and_look_avx2(__VA_ARGS__) : copy_and_look_any(__VA_ARGS__))
#else
#define copy_and_look copy_and_look_any
#endif

/* The first that is bad among values in place; -1 for none. */
static inline int64_t first_bad32(const void *values, int64_t count, badness bad) {
    const int32_t *at = (const int32_t *)values;
    if (!copy_and_look(NULL, at, count, bad, 0)) return -1;
    for (int64_t i = 0; i < count; i++)
        if (is_bad32(at[i], bad)) return i;
    return -1;
}

/* Makes float32 values log-probabilities, in place; how many of them are not recorded. */
static inline int64_t mark_logprobs(float *values, int64_t count) {
    int64_t none = 0;
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t end = count - at < CHUNK ? count : at + CHUNK;
        int32_t some = 0;
        if (!copy_and_look(NULL, (const int32_t *)(values + at), end - at, UNUSUAL_LOGPROB, 0)) continue;
        for (int64_t i = at; i < end; i++) values[i] = logprob_of(values[i]), some += values[i] != values[i];
        none += some;
    }
    return none;
}

/* Copies while none is bad; -1, or the first that is. Of log-probabilities, how many are not recorded. */
static inline int64_t copy_checked32(void *to_, const void *from_, int64_t count, badness bad, int is_cold) {
    int32_t *to = (int32_t *)to_;
    const int32_t *from = (const int32_t *)from_;
    int64_t head = is_cold ? (int64_t)((-(uintptr_t)to & 63) / sizeof *to) : 0, none = 0;
    if (!is_cold || count * (int64_t)sizeof *to < SHORTEST_STREAM) is_cold = 0, head = 0;
    for (int64_t at = 0, some = head ? head : CHUNK; at < count; at += some, some = CHUNK) {
        if (some > count - at) some = count - at;
        if (!copy_and_look(to + at, from + at, some, bad, is_cold && at >= head)) continue;
        if (bad != UNUSUAL_LOGPROB) return at + first_bad32(to + at, some, bad);
        none += mark_logprobs((float *)(to + at), some);
    }
    return bad == UNUSUAL_LOGPROB ? none : -1;
}

static inline int64_t first_non_finite64(const double *values, int64_t count) {
    const uint64_t ones = 0x7ff0000000000000u;
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, values + i, sizeof bits);
        if ((bits & ones) == ones) return i;
    }
    return -1;
}

/* A chunk in which something was bad, and nothing is any more, was changed meanwhile: it is converted again. */
static inline int64_t int64_to_int32(int32_t *to, const int64_t *from, int64_t count, int64_t least) {
    for (int64_t at = 0; at < count;) {
        int64_t end = count - at < CHUNK ? count : at + CHUNK, bad = 0;
        if (least < 0)
            for (int64_t i = at; i < end; i++) bad |= (to[i] = (int32_t)from[i]) ^ from[i];
        else
            for (int64_t i = at; i < end; i++) to[i] = (int32_t)from[i], bad |= from[i];
        if (least < 0 ? !bad : !((uint64_t)bad >> 31)) {
            at = end;
            continue;
        }
        for (int64_t i = at; i < end; i++)
            if (from[i] != (int32_t)from[i] || from[i] < least) return i;
    }
    return -1;
}

static inline int64_t int64_to_uint8(uint8_t *to, const int64_t *from, int64_t count) {
    for (;;) {
        uint64_t bad = 0;
        for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)from[i], bad |= (uint64_t)from[i] > UINT8_MAX;
        if (!bad) return -1;
        for (int64_t i = 0; i < count; i++)
            if ((uint64_t)from[i] > UINT8_MAX) return i;
    }
}

static inline void float64_to_float32(float *to, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = (float)from[i];
}

#endif
