/* Where new memory lies: sizes of pages, and the NUMA node that a thread prefers.
 * Plain system calls; no shared word. */
#ifndef SHMBRIDGE_PLACEMENT_H
#define SHMBRIDGE_PLACEMENT_H

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE (2u << 20) /* what is one page of the second level where pages have 4 KiB */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define NODES 1024
#define PREFER_ONE_NODE 1 /* MPOL_PREFERRED of linux/mempolicy.h, which not every libc ships */

typedef struct {
    int mode;
    unsigned long nodes[NODES / (8 * sizeof(unsigned long))];
} node_choice;

/* What this thread has worked, in the kernel too: waiting for a processor is not counted. */
static inline int64_t worked_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* From here on new memory of this thread comes from `node` if that has any. 0, or -1:
 * the kernel does not let us; then nothing has changed. */
static inline int node_policy(node_choice *kept, int node) {
    node_choice wanted = {.mode = PREFER_ONE_NODE};
    *kept = (node_choice){0};
    if (node < 0 || node >= NODES - 1) return -1;
    if (syscall(SYS_get_mempolicy, &kept->mode, kept->nodes, NODES, NULL, 0)) return -1;
    wanted.nodes[node / (8 * sizeof(unsigned long))] = 1ul << node % (8 * sizeof(unsigned long));
    return syscall(SYS_set_mempolicy, wanted.mode, wanted.nodes, NODES) ? -1 : 0;
}

static inline void node_policy_restore(const node_choice *kept) {
    syscall(SYS_set_mempolicy, kept->mode, kept->nodes, NODES);
}

#endif
