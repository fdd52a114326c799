/* Arrays of one type into arrays of another, checked. Each function returns -1, or the index of the first
 * value that does not fit. No Python. */
#ifndef SHMBRIDGE_CONVERT_H
#define SHMBRIDGE_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "lane_copy.h"

#define CHUNK 4096 /* values: they are still in the first cache when they are looked at again */

/* Whether all are finite: an exponent of all ones is infinity or NaN. */
static inline int all_finite32(const float *values, int64_t count) {
    const uint32_t ones = 0x7f800000u;
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bad |= (bits & ones) == ones;
    }
    return !bad;
}

static inline int64_t first_non_finite32(const float *values, int64_t count) {
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t some = count - at < CHUNK ? count - at : CHUNK;
        if (all_finite32(values + at, some)) continue;
        for (int64_t i = at; i < at + some; i++)
            if (!all_finite32(values + i, 1)) return i;
    }
    return -1;
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

/* Copies while all are finite. The source is checked first:
 * values stored past the cache should not be read again. */
static inline int64_t copy_finite32(float *to, const float *from, int64_t count, int is_cold) {
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t some = count - at < CHUNK ? count - at : CHUNK;
        if (!all_finite32(from + at, some)) return at + first_non_finite32(from + at, some);
        lane_copy(to + at, from + at, some * sizeof *to, is_cold);
    }
    return -1;
}

static inline int64_t int64_to_int32(int32_t *to, const int64_t *from, int64_t count, int64_t least) {
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t end = count - at < CHUNK ? count : at + CHUNK, bad = 0;
        if (least < 0)
            for (int64_t i = at; i < end; i++) bad |= (to[i] = (int32_t)from[i]) ^ from[i];
        else
            for (int64_t i = at; i < end; i++) to[i] = (int32_t)from[i], bad |= from[i];
        if (least < 0 ? !bad : !((uint64_t)bad >> 31)) continue;
        for (int64_t i = at; i < end; i++)
            if (from[i] != (int32_t)from[i] || from[i] < least) return i;
    }
    return -1;
}

/* Whether any is negative: four sums of signs at a time, since one would wait for itself. */
static inline __attribute__((always_inline)) int any_negative_of(const int32_t *values, int64_t count) {
    typedef int32_t wide __attribute__((vector_size(32), aligned(4), may_alias));
    wide a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    int32_t bad = 0;
    for (; i + 32 <= count; i += 32) {
        a |= *(const wide *)(values + i), b |= *(const wide *)(values + i + 8);
        c |= *(const wide *)(values + i + 16), d |= *(const wide *)(values + i + 24);
    }
    a |= b | c | d;
    for (int k = 0; k < 8; k++) bad |= a[k];
    for (; i < count; i++) bad |= values[i];
    return bad < 0;
}

#ifdef __x86_64__
static __attribute__((target("avx2"))) int any_negative_avx2(const int32_t *values, int64_t count) {
    return any_negative_of(values, count);
}
#define any_negative(values, count) \
    (__builtin_cpu_supports("avx2") ? any_negative_avx2(values, count) : any_negative_of(values, count))
#else
#define any_negative any_negative_of
#endif

static inline int64_t first_negative32(const int32_t *values, int64_t count) {
    if (!any_negative(values, count)) return -1;
    for (int64_t i = 0; i < count; i++)
        if (values[i] < 0) return i;
    return -1;
}

/* Copies while none is negative. The source is checked first:
 * values stored past the cache should not be read again. */
static inline int64_t copy_from_zero32(int32_t *to, const int32_t *from, int64_t count, int is_cold) {
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t some = count - at < CHUNK ? count - at : CHUNK, bad = first_negative32(from + at, some);
        if (bad >= 0) return at + bad;
        lane_copy(to + at, from + at, some * sizeof *to, is_cold);
    }
    return -1;
}

static inline int64_t int64_to_uint8(uint8_t *to, const int64_t *from, int64_t count) {
    uint64_t bad = 0;
    for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)from[i], bad |= (uint64_t)from[i] > UINT8_MAX;
    for (int64_t i = 0; bad && i < count; i++)
        if ((uint64_t)from[i] > UINT8_MAX) return i;
    return -1;
}

static inline void float64_to_float32(float *to, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = (float)from[i];
}

#endif
