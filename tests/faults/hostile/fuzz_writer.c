/* A producer whose lane is scribbled over while it puts: the writer's
 * side of lane_write.h on heap memory of exactly the lane's size.
 *
 * The input is a list of steps: claim, fill, commit, abort, release, look, scribble. Whatever stands in
 * shared memory, what a claim gives must lie inside the data area, and nothing outside the segment may be
 * touched. Built and run like fuzz_lane.c; needs no seeds of its own.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lane_write.h"

#define SLOTS 8u
#define DATA_BYTES 4096u

typedef struct {
    uint8_t what, which, width_log2, spare;
    uint32_t at;
    uint64_t value;
} step;

static uint64_t records_read; /* committed, here */

static void must(int truth, const char *what) {
    if (truth) return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

static void scribble(uint8_t *base, uint64_t size, const step *one) {
    uint64_t width = 1ull << (one->width_log2 & 3), at = one->at % (size - 7) & ~(width - 1);
    memcpy(base + at, &one->value, width);
}

static void perform(lane_writer *writer, uint8_t *base, const lane_geometry *geometry, const step *one) {
    slot stamp = {.rows = 1, .tokens = one->value & 7};
    switch (one->what % 8) {
    case 0:
    case 1:
        if (writer->claimed >= 0 || !lane_claim(writer, 1 + one->value % DATA_BYTES)) break;
        must(writer->claim_at <= geometry->data_bytes &&
                 writer->claim_bytes <= geometry->data_bytes - writer->claim_at,
             "a claim is inside the data");
        memset(writer->data + writer->claim_at, one->which, writer->claim_bytes);
        break;
    case 2:
        if (writer->claimed >= 0) lane_commit(writer, &stamp), records_read++;
        break;
    case 3:
        if (writer->claimed >= 0) lane_abort(writer);
        break;
    case 4: /* as the hub does */
        store_seq64(&writer->released[one->which % SLOTS],
                    load_acquire64(&writer->slots[one->which % SLOTS].generation));
        break;
    case 5:
        must(lane_free_bytes(writer) <= geometry->data_bytes, "no more bytes are free than there are");
        must(lane_unreleased(writer) <= SLOTS, "no more records than slots");
        lane_note_outstanding(writer);
        lane_anything_released(writer);
        break;
    case 6: lane_reclaim(writer, one->which & 1); break;
    default: scribble(base, geometry->segment_bytes, one);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    lane_geometry geometry = geometry_of(DATA_BYTES, SLOTS);
    control_header *hub = NULL;
    lane_writer writer;
    uint8_t *base = NULL;
    step one;
    if (posix_memalign((void **)&base, PAGE, geometry.segment_bytes) ||
        posix_memalign((void **)&hub, PAGE, sizeof *hub))
        abort();
    memset(base, 0, geometry.segment_bytes), memset(hub, 0, sizeof *hub);
    must(lane_writer_open(&writer, base, &geometry, hub) == 0, "memory");
    for (; size >= sizeof one; input += sizeof one, size -= sizeof one) {
        memcpy(&one, input, sizeof one);
        perform(&writer, base, &geometry, &one);
    }
    lane_writer_close(&writer);
    free(base), free(hub);
    return 0;
}

#ifndef WITH_LIBFUZZER
#include "mutate.h"
#endif
