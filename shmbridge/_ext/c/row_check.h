/* The check of one row's values in one column, and which rows get one.
 *
 * A check is the checksum of the values' bytes as they lie in the lane, little-endian as all of it, seeded by
 * that of the column's name: the same values in another column, one place further, or cut have another one.
 * Never 0, which stands for none. Plain C without Python.
 */
#ifndef SHMBRIDGE_ROW_CHECK_H
#define SHMBRIDGE_ROW_CHECK_H

#include <string.h>

#include "checksum.h"

static inline uint64_t row_check_seed(const char *column) {
    return checksum_of((const uint8_t *)column, strlen(column));
}

/* Of the `every` rows of a producer from every * round on, the one that is checked: scattered, so that no
 * place in a group is left out: the finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable
 * pseudorandom number generators", 2014). */
static inline uint64_t checked_of(uint64_t round, uint32_t every) {
    uint64_t number = round + 0x9e3779b97f4a7c15ull;
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ull;
    number = (number ^ number >> 27) * 0x94d049bb133111ebull;
    return round * every + ((number >> 32) * every >> 32);
}

/* The first row from this number on that is checked; `every` is 1 or more. */
static inline uint64_t next_checked(uint64_t number, uint32_t every) {
    uint64_t checked = checked_of(number / every, every);
    return checked >= number ? checked : checked_of(number / every + 1, every);
}

/* The checks of a list column's rows, one after another from `values` on; 0 for a row that gets none, or is
 * null. Returns -1 if a row that gets one is not within the `count` values that there are: it is not read. */
static inline int row_checks_write(uint64_t *to, const uint8_t *values, uint64_t count,
                                   const uint32_t *lengths, const uint8_t *valid, uint64_t rows,
                                   uint32_t item, uint64_t seed, uint64_t first, uint32_t every) {
    uint64_t row = 0, before = 0;
    memset(to, 0, rows * sizeof *to);
    for (uint64_t at = next_checked(first, every) - first; at < rows; at = next_checked(first + at + 1, every) - first) {
        for (; row < at; row++) before += lengths[row];
        if (before + lengths[row] > count) return -1;
        if (!valid || valid[row])
            to[row] = checksum_seeded(values + before * item, lengths[row] * (uint64_t)item, seed);
    }
    return 0;
}

#endif
