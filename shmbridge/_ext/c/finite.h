/* Whether floating-point numbers are finite, by their bits: NaN and the infinities of a type are the numbers
 * whose (bits & mask) == value. For bytes that a copy has just read, which the cache still has. Pure.
 */
#ifndef SHMBRIDGE_FINITE_H
#define SHMBRIDGE_FINITE_H

#include <stdint.h>
#include <string.h>

/* A number of `width` bytes in each place of a word. */
static inline uint64_t in_each_place(uint64_t number, uint64_t width) {
    for (; width < 8; width *= 2) number |= number << 8 * width;
    return number;
}

/* `width`: bytes of a number, 1, 2, 4 or 8. Looks at a word of numbers at a time: one of them is `value` where
 * their difference has a 0 in its place, which is where subtracting 1 borrows. */
static inline int numbers_are_finite(const uint8_t *at, uint64_t count, uint64_t width, uint64_t mask,
                                     uint64_t value) {
    uint64_t masks = in_each_place(mask, width), values = in_each_place(value, width);
    uint64_t ones = in_each_place(1, width), highest = ones << (8 * width - 1);
    uint64_t words = count * width / 8, strange = 0, bits;
    for (uint64_t i = 0; i < words; i++) {
        memcpy(&bits, at + 8 * i, 8);
        bits = (bits & masks) ^ values;
        strange |= (bits - ones) & ~bits & highest;
    }
    bits = 0;
    memcpy(&bits, at + 8 * words, count * width % 8);
    bits = (bits & masks) ^ values;
    return !(strange | ((bits - ones) & ~bits & highest));
}

#endif
