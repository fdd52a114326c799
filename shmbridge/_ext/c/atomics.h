/* The atomic verbs of the ring, and nothing else.
 *
 * Every ordered use elsewhere carries a SYNC(tag) comment; docs/memory-model.md has one row per tag. Plain
 * loads and stores of shared words are not ordered by Cython or by the GIL, so no shared word is touched
 * except through these.
 */
#ifndef SHMBRIDGE_ATOMICS_H
#define SHMBRIDGE_ATOMICS_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2,
               "64-bit atomics must be lock-free: a lock would live in one process only");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2,
               "32-bit atomics must be lock-free: a lock would live in one process only");
_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4,
               "atomics must have the size of their value");

typedef _Atomic uint64_t shm_u64;
typedef _Atomic uint32_t shm_u32;

static inline uint64_t load_relaxed64(const shm_u64 *word) {
    return atomic_load_explicit((shm_u64 *)word, memory_order_relaxed);
}
static inline uint64_t load_acquire64(const shm_u64 *word) {
    return atomic_load_explicit((shm_u64 *)word, memory_order_acquire);
}
static inline uint64_t load_seq64(const shm_u64 *word) {
    return atomic_load_explicit((shm_u64 *)word, memory_order_seq_cst);
}
static inline void store_relaxed64(shm_u64 *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}
static inline void store_release64(shm_u64 *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}
static inline void store_seq64(shm_u64 *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_seq_cst);
}

static inline void add_seq64(shm_u64 *word, uint64_t count) {
    atomic_fetch_add_explicit(word, count, memory_order_seq_cst);
}

static inline uint32_t load_seq32(const shm_u32 *word) {
    return atomic_load_explicit((shm_u32 *)word, memory_order_seq_cst);
}
static inline void store_seq32(shm_u32 *word, uint32_t value) {
    atomic_store_explicit(word, value, memory_order_seq_cst);
}
static inline void add_seq32(shm_u32 *word) { atomic_fetch_add_explicit(word, 1, memory_order_seq_cst); }

/* Whole 64-bit words, one by one: a table that may be rewritten while it is read,
 * between two looks at a word that says so. */
static inline void store_release_words(shm_u64 *to, const void *from, uint64_t count) {
    for (uint64_t i = 0, word; i < count; i++) {
        memcpy(&word, (const char *)from + 8 * i, 8);
        store_release64(to + i, word);
    }
}
static inline void load_acquire_words(void *to, const shm_u64 *from, uint64_t count) {
    for (uint64_t i = 0, word; i < count; i++) {
        word = load_acquire64(from + i);
        memcpy((char *)to + 8 * i, &word, 8);
    }
}

/* What was copied before is not read again from where it came: a compiler may otherwise do so. */
static inline void copied(void) { atomic_signal_fence(memory_order_seq_cst); }

/* Everything read before is read before any load after it: the second look of a reader that holds no lock. */
static inline void reads_before_next_load(void) { atomic_thread_fence(memory_order_acquire); }

/* Tells the core that this is a spin loop: saves power, frees the sibling thread, changes no meaning. */
static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
