/* What GenMC cannot interpret, in place of futex.h, faults.h and extents.h: the kernel,
 * and moves of a size found at run time.
 *
 * futex_wait is a loop that only the bell ends, without a tick: a lost wake-up is then a loop for ever,
 * which --check-liveness reports.
 */
#define SHMBRIDGE_FUTEX_H
#define SHMBRIDGE_FAULTS_H
#define SHMBRIDGE_EXTENTS_H

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

static inline int64_t monotonic_ns(void) { return 1; }
static inline void fault_hit(const char *label) { (void)label; }
static inline void disturb(void) {}
static inline int futex_wait(shm_u32 *word, uint32_t seen, int64_t timeout_ns) {
    (void)timeout_ns;
    while (load_seq32(word) == seen) {}
    return 0;
}
static inline void ring_bell(shm_u32 *bell) {
    add_seq32(bell); /* SYNC(bell) */
}

typedef struct {
    uint64_t at, bytes;
} interval;

/* One extent of a line per slot, taken and given back as a stack. */
static inline uint64_t extent_take(interval *free_list, uint32_t *count, uint64_t bytes) {
    (void)bytes;
    return *count ? free_list[--*count].at : UINT64_MAX;
}
static inline void extent_give(interval *free_list, uint32_t *count, uint64_t at, uint64_t bytes) {
    (void)bytes;
    free_list[(*count)++].at = at;
}

/* The one memcpy that tests reach: a slot's body, field by field,
 * since GenMC wants each word read as it was written. */
static inline void copy_slot(void *into, const void *from) {
    slot *to = into;
    const slot *at = from;
    to->sequence = at->sequence, to->extent_at = at->extent_at, to->extent_bytes = at->extent_bytes;
    to->min_policy_version = at->min_policy_version, to->max_policy_version = at->max_policy_version;
    to->t_created_ns = at->t_created_ns, to->t_publish_ns = at->t_publish_ns, to->tokens = at->tokens;
    to->rows = at->rows, to->columns = at->columns, to->group_size = at->group_size, to->env_id = at->env_id;
    to->group_id_bytes = at->group_id_bytes, to->flags = at->flags, to->index_bytes = at->index_bytes;
}

#define memcpy(to, from, size) copy_slot(to, from)
#define snprintf(...) 0
#define qsort sort_few
static inline void sort_few(void *base, size_t count, size_t size, int (*before)(const void *, const void *));
