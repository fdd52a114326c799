/* A 64-bit checksum of bytes, as fast as memory is read. Finds overwritten and torn bytes;
 * no defence against forged ones.
 *
 * Eight lanes of 64 bits, each a multiplication and a rotation per word: for one lane every step is a
 * bijection of its state, so that a single changed word always changes the result of its lane.
 */
#ifndef SHMBRIDGE_CHECKSUM_H
#define SHMBRIDGE_CHECKSUM_H

#include <stdint.h>
#include <string.h>

#define CHECKSUM_LANES 8
#define CHECKSUM_PRESENT (1ull << 63)

static inline uint64_t checksum_step(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0x9e3779b97f4a7c15ull; /* 2^64 over the golden ratio, odd */
    return state << 31 | state >> 33;
}

/* Never 0, which stands for none. Another seed, another checksum of the same bytes. */
static inline uint64_t checksum_seeded(const uint8_t *bytes, uint64_t size, uint64_t seed) {
    uint64_t lanes[CHECKSUM_LANES], rest = size, all = size ^ seed, word;
    for (int i = 0; i < CHECKSUM_LANES; i++) lanes[i] = i + 1;
    for (; rest >= 8 * CHECKSUM_LANES; rest -= 8 * CHECKSUM_LANES, bytes += 8 * CHECKSUM_LANES) {
        uint64_t words[CHECKSUM_LANES];
        memcpy(words, bytes, sizeof words);
        for (int i = 0; i < CHECKSUM_LANES; i++) lanes[i] = checksum_step(lanes[i], words[i]);
    }
    for (int i = 0; rest; i++) {
        uint64_t count = rest < 8 ? rest : 8;
        word = 0;
        memcpy(&word, bytes, count);
        lanes[i] = checksum_step(lanes[i], word);
        bytes += count, rest -= count;
    }
    for (int i = 0; i < CHECKSUM_LANES; i++) all = checksum_step(all, lanes[i]);
    return (all ^ all >> 29) | CHECKSUM_PRESENT;
}

static inline uint64_t checksum_of(const uint8_t *bytes, uint64_t size) {
    return checksum_seeded(bytes, size, 0);
}

#endif
