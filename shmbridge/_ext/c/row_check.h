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

/* Whether a producer's row of this number is one of one in `every`; of 0 none is. Scattered, so that no
 * place in a group is left out: the finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable
 * pseudorandom number generators", 2014). */
static inline int row_is_checked(uint64_t number, uint32_t every) {
    if (every <= 1) return (int)every;
    number = (number + 0x9e3779b97f4a7c15ull);
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ull;
    number = (number ^ number >> 27) * 0x94d049bb133111ebull;
    return (number >> 32) * every >> 32 == 0;
}

static inline int any_row_is_checked(uint64_t first, uint64_t rows, uint32_t every) {
    for (uint64_t row = 0; row < rows; row++)
        if (row_is_checked(first + row, every)) return 1;
    return 0;
}

/* The checks of a list column's rows, one after another from `values` on; 0 for a row that gets none, or is
 * null. Returns -1 if the lengths make more than the `count` values that there are: none behind is read. */
static inline int row_checks_write(uint64_t *to, const uint8_t *values, uint64_t count,
                                   const uint32_t *lengths, const uint8_t *valid, uint64_t rows,
                                   uint32_t item, uint64_t seed, uint64_t first, uint32_t every) {
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t bytes = lengths[row] * (uint64_t)item;
        int checked = row_is_checked(first + row, every) && (!valid || valid[row]);
        if (lengths[row] > count) return -1;
        to[row] = checked ? checksum_seeded(values, bytes, seed) : 0;
        values += bytes, count -= lengths[row];
    }
    return 0;
}

#endif
