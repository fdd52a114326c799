/* Allocator of a lane's data area. Private to the producer: nothing here is shared,
 * so nothing here needs recovery.
 *
 * Free space is an array of disjoint intervals sorted by address, never adjacent.
 * With n live extents there are at most n + 1 intervals.
 *
 * While the consumer keeps up, extents go round in a window at the start of the area: each behind the last,
 * and from the lowest again. The window is some times a core's own cache: memory that comes again sooner
 * still lies, written, in the reader's or the writer's own cache, and fetching it from there is slower than
 * from the cache they share; memory that comes again much later has left that, too. Where the window has no
 * room, the lowest place that fits is taken: if there is a place, one is found.
 */
#ifndef SHMBRIDGE_EXTENTS_H
#define SHMBRIDGE_EXTENTS_H

#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t at, bytes;
} interval;

/* Takes `bytes` out of interval `i` at a place inside it. */
static inline void extent_cut(interval *free_list, uint32_t *count, uint32_t i, uint64_t at, uint64_t bytes) {
    interval left = {free_list[i].at, at - free_list[i].at};
    interval right = {at + bytes, free_list[i].at + free_list[i].bytes - at - bytes};
    if (left.bytes && right.bytes) {
        memmove(free_list + i + 1, free_list + i, (*count - i) * sizeof(interval));
        free_list[i] = left, free_list[i + 1] = right, ++*count;
    } else if (left.bytes || right.bytes) {
        free_list[i] = left.bytes ? left : right;
    } else {
        memmove(free_list + i, free_list + i + 1, (--*count - i) * sizeof(interval));
    }
}

/* Takes `bytes` at or behind *cursor, ending within `window`; else from the first interval that has them.
 * The place, or UINT64_MAX. */
static inline uint64_t extent_take(interval *free_list, uint32_t *count, uint64_t bytes, uint64_t *cursor,
                                   uint64_t window) {
    uint32_t lowest = UINT32_MAX;
    for (uint32_t i = 0; i < *count; i++) {
        uint64_t at = free_list[i].at, end = at + free_list[i].bytes;
        if (end - at < bytes) continue;
        if (lowest == UINT32_MAX) lowest = i;
        if (at < *cursor) at = *cursor;
        if (at + bytes > window) break;
        if (at + bytes > end) continue;
        extent_cut(free_list, count, i, at, bytes);
        *cursor = at + bytes;
        return at;
    }
    if (lowest == UINT32_MAX) return UINT64_MAX;
    uint64_t at = free_list[lowest].at;
    extent_cut(free_list, count, lowest, at, bytes);
    *cursor = at + bytes;
    return at;
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
