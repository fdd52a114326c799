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
#define CHECKSUM_BLOCK (8 * CHECKSUM_LANES)
#define CHECKSUM_PRESENT (1ull << 63)

static inline uint64_t checksum_step(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0x9e3779b97f4a7c15ull; /* 2^64 over the golden ratio, odd */
    return state << 31 | state >> 33;
}

/* Whole blocks of eight words; returns the bytes that are left. */
static inline uint64_t checksum_blocks(uint64_t *lanes, const uint8_t *bytes, uint64_t size) {
    for (; size >= CHECKSUM_BLOCK; size -= CHECKSUM_BLOCK, bytes += CHECKSUM_BLOCK) {
        uint64_t words[CHECKSUM_LANES];
        memcpy(words, bytes, sizeof words);
        for (int i = 0; i < CHECKSUM_LANES; i++) lanes[i] = checksum_step(lanes[i], words[i]);
    }
    return size;
}

/* The last bytes, fewer than a block, of `size` in all. */
static inline uint64_t checksum_rest(uint64_t *lanes, const uint8_t *bytes, uint64_t rest, uint64_t size,
                                     uint64_t seed) {
    uint64_t all = size ^ seed, word;
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

/* Never 0, which stands for none. Another seed, another checksum of the same bytes. */
static inline uint64_t checksum_seeded(const uint8_t *bytes, uint64_t size, uint64_t seed) {
    uint64_t lanes[CHECKSUM_LANES], rest;
    for (int i = 0; i < CHECKSUM_LANES; i++) lanes[i] = i + 1;
    rest = checksum_blocks(lanes, bytes, size);
    return checksum_rest(lanes, bytes + size - rest, rest, size, seed);
}

/* The same of bytes that come in pieces: begin, add each, end. */
typedef struct {
    uint64_t lanes[CHECKSUM_LANES];
    uint64_t size;
    uint8_t block[CHECKSUM_BLOCK]; /* its first size % CHECKSUM_BLOCK bytes wait for the rest */
} checksum_pieces;

static inline void checksum_begin(checksum_pieces *all) {
    for (int i = 0; i < CHECKSUM_LANES; i++) all->lanes[i] = i + 1;
    all->size = 0;
}

static inline void checksum_add(checksum_pieces *all, const uint8_t *bytes, uint64_t size) {
    uint64_t held = all->size % CHECKSUM_BLOCK, rest;
    all->size += size;
    if (held) {
        uint64_t first = size < CHECKSUM_BLOCK - held ? size : CHECKSUM_BLOCK - held;
        memcpy(all->block + held, bytes, first);
        bytes += first, size -= first;
        if (held + first < CHECKSUM_BLOCK) return;
        checksum_blocks(all->lanes, all->block, CHECKSUM_BLOCK);
    }
    rest = checksum_blocks(all->lanes, bytes, size);
    memcpy(all->block, bytes + size - rest, rest);
}

static inline uint64_t checksum_end(checksum_pieces *all, uint64_t seed) {
    return checksum_rest(all->lanes, all->block, all->size % CHECKSUM_BLOCK, all->size, seed);
}

static inline uint64_t checksum_of(const uint8_t *bytes, uint64_t size) {
    return checksum_seeded(bytes, size, 0);
}

#endif
