/* First-fit allocator of a lane's data area. Private to the producer: nothing here is shared, so nothing here needs recovery.
 *
 * Free space is an array of disjoint intervals sorted by address, never adjacent. First fit from the lowest address keeps the same few
 * cache-warm pages in use while the consumer keeps up. With n live extents there are at most n + 1 intervals.
 */
#ifndef SHMBRIDGE_EXTENTS_H
#define SHMBRIDGE_EXTENTS_H

#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t at, bytes;
} interval;

/* Takes `bytes` from the first interval that has them. The place, or UINT64_MAX. */
static inline uint64_t extent_take(interval *free_list, uint32_t *count, uint64_t bytes) {
    for (uint32_t i = 0; i < *count; i++) {
        if (free_list[i].bytes < bytes) continue;
        uint64_t at = free_list[i].at;
        free_list[i].at += bytes;
        free_list[i].bytes -= bytes;
        if (free_list[i].bytes == 0) memmove(free_list + i, free_list + i + 1, (--*count - i) * sizeof(interval));
        return at;
    }
    return UINT64_MAX;
}

static inline void extent_give(interval *free_list, uint32_t *count, uint64_t at, uint64_t bytes) {
    uint32_t low = 0, high = *count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (free_list[middle].at < at) low = middle + 1;
        else high = middle;
    }
    int joins_left = low > 0 && free_list[low - 1].at + free_list[low - 1].bytes == at;
    int joins_right = low < *count && at + bytes == free_list[low].at;
    if (joins_left && joins_right) {
        free_list[low - 1].bytes += bytes + free_list[low].bytes;
        memmove(free_list + low, free_list + low + 1, (--*count - low) * sizeof(interval));
    } else if (joins_left) {
        free_list[low - 1].bytes += bytes;
    } else if (joins_right) {
        free_list[low].at = at;
        free_list[low].bytes += bytes;
    } else {
        memmove(free_list + low + 1, free_list + low, ((*count)++ - low) * sizeof(interval));
        free_list[low].at = at;
        free_list[low].bytes = bytes;
    }
}

#endif
