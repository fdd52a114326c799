/* Sizes of pages, and the work that it took to find a large one. */
#ifndef SHMBRIDGE_PLACEMENT_H
#define SHMBRIDGE_PLACEMENT_H

#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE_PAGE (2u << 20) /* a page of the second level where pages have 4 KiB */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* What this thread has worked, in the kernel too: waiting for a processor is not counted. */
static inline int64_t worked_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
