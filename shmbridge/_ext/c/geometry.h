/* The places of a lane's parts, computed from two numbers, and a lane header's claim about them.
 *
 * A process that opens a lane copies the claim to private memory, checks the copy, and computes with the
 * copy: the header may change at any time.
 */
#ifndef SHMBRIDGE_GEOMETRY_H
#define SHMBRIDGE_GEOMETRY_H

#include <inttypes.h>
#include <stdio.h>

#include "layout.h"

/* What cannot be true, in words. */
typedef struct {
    char text[200];
} complaint;

#define complain(why, ...) (snprintf((why)->text, sizeof(why)->text, __VA_ARGS__), -1)

typedef struct {
    uint32_t slot_count, column_count;
    uint64_t data_bytes;
    uint64_t ring_at, slots_at, released_at, data_at, segment_bytes;
} lane_geometry;

static inline uint64_t up_to(uint64_t size, uint64_t unit) { return (size + unit - 1) & ~(unit - 1); }

static inline lane_geometry geometry_of(uint64_t data_bytes, uint32_t slot_count) {
    lane_geometry geometry = {.slot_count = slot_count, .data_bytes = data_bytes};
    geometry.ring_at = PAGE + MAX_COLUMNS * sizeof(column_def);
    geometry.slots_at = up_to(geometry.ring_at + (uint64_t)slot_count * sizeof(uint32_t), PAGE);
    geometry.released_at = up_to(geometry.slots_at + (uint64_t)slot_count * sizeof(slot), PAGE);
    geometry.data_at = up_to(geometry.released_at + (uint64_t)slot_count * sizeof(shm_u64), DATA_PAGE);
    geometry.segment_bytes = up_to(geometry.data_at + data_bytes, PAGE);
    return geometry;
}

/* A checked private copy of the geometry that a lane of `size`
 * mapped bytes claims to have. 0, or -1 and why. */
static inline int geometry_read(const lane_header *header, uint64_t size, lane_geometry *geometry,
                                complaint *why) {
    uint32_t version, slots, columns;
    uint64_t data;
    if (size < PAGE + MAX_COLUMNS * sizeof(column_def))
        return complain(why, "%" PRIu64 " bytes are no lane", size);
    version = header->layout_version, slots = header->slot_count, columns = header->column_count;
    data = header->data_bytes;
    copied();
    if (version != LAYOUT_VERSION)
        return complain(why, "layout version %u, this build reads %u", version, LAYOUT_VERSION);
    if (slots == 0 || slots & (slots - 1) || slots > MOST_SLOTS || data > size || columns > MAX_COLUMNS)
        return complain(why, "%u slots, %" PRIu64 " data bytes, %u columns in %" PRIu64 " bytes", slots, data,
                        columns, size);
    *geometry = geometry_of(data, slots);
    geometry->column_count = columns;
    if (geometry->segment_bytes > size || header->segment_bytes != geometry->segment_bytes ||
        header->ring_at != geometry->ring_at || header->slots_at != geometry->slots_at ||
        header->released_at != geometry->released_at || header->data_at != geometry->data_at)
        return complain(why,
                        "geometry: ring at %" PRIu64 ", slots at %" PRIu64 ", released at %" PRIu64
                        ", data at %" PRIu64 " do not belong to %u slots",
                        header->ring_at, header->slots_at, header->released_at, header->data_at, slots);
    return 0;
}

#endif
