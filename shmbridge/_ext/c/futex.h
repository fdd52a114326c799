/* Sleeping on a 32-bit word of shared memory. The futexes are shared, not private:
 * sleeper and waker are different processes. */
#ifndef SHMBRIDGE_FUTEX_H
#define SHMBRIDGE_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Sleeps until woken, at most timeout_ns, not at all if *word differs from seen. 0, or the errno:
 * EAGAIN, ETIMEDOUT, EINTR. */
static inline int futex_wait(shm_u32 *word, uint32_t seen, int64_t timeout_ns) {
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    return syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, seen, &timeout, NULL, 0) == 0 ? 0 : errno;
}

static inline void futex_wake_all(shm_u32 *word) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Rings a doorbell: the sleeper either sees the new value before it sleeps, or is woken. */
static inline void ring_bell(shm_u32 *bell) {
    add_seq32(bell); /* SYNC(bell) */
    futex_wake_all(bell);
}

#endif
