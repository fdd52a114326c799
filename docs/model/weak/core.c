/* The C core under GenMC, which visits every execution that C11 (RC11)
 * or the weaker hardware model IMM allows of a small test.
 *
 *   python tests/house/sanitize/planted.py --model          needs genmc 0.10 (github.com/MPI-SWS/genmc)
 *
 * The functions are those of shmbridge/_ext/c, unchanged, over one lane of SLOTS slots; GenMC reports data
 * races by itself. A test is chosen by -DTEST=...; what each asks is beside it.
 */
#include "stubs.h"

#include <assert.h>
#include <pthread.h>

#include "hub_wait.h"
#include "lane_read.h"
#include "lane_write.h"

#ifndef SLOTS
#define SLOTS 1
#endif
#define LINE (ALIGNMENT / sizeof(uint64_t))

/* A lane's segment with types, so that every word has its own; the places are not those of layout.h. */
static lane_header lane;
static control_header control;
static uint32_t ring[SLOTS];
static slot slots[SLOTS];
static shm_u64 released[SLOTS];
static uint64_t data[SLOTS][LINE];

static uint32_t free_slots[SLOTS], outstanding[SLOTS];
static interval free_extents[SLOTS + 2];
static own_slot own[SLOTS];
static lane_entry backlog_memory[SLOTS];
static lane_writer writer;
static lane_reader reader, next_reader;

static inline void sort_few(void *base, size_t count, size_t size,
                            int (*before)(const void *, const void *)) {
    lane_entry *entries = base;
    (void)size;
    for (size_t i = 1; i < count; i++)
        for (size_t k = i; k > 0 && before(&entries[k - 1], &entries[k]) > 0; k--) {
            lane_entry other = entries[k];
            entries[k] = entries[k - 1], entries[k - 1] = other;
        }
}

static void open_lane(void) {
    writer = (lane_writer){.header = &lane, .hub = &control, .slot_count = SLOTS, .claimed = -1};
    writer.ring = ring, writer.slots = slots, writer.released = released;
    writer.own = own, writer.free_slots = free_slots;
    writer.outstanding = outstanding, writer.free_extents = free_extents;
    writer.data = (uint8_t *)data, writer.data_bytes = sizeof data;
    writer.free_slot_count = writer.free_extent_count = SLOTS;
    for (uint32_t i = 0; i < SLOTS; i++)
        free_slots[i] = SLOTS - 1 - i, free_extents[i].at = (SLOTS - 1 - i) * ALIGNMENT;
    reader = (lane_reader){.header = &lane, .ring = ring, .slots = slots, .released = released};
    reader.data = (const uint8_t *)data;
    reader.geometry.slot_count = SLOTS, reader.geometry.data_bytes = sizeof data;
    next_reader = reader;
}

static uint64_t *claimed_word(void) { return (uint64_t *)(writer.data + writer.claim_at); }

/* 1, or 0 if there was no room. */
static int put(uint64_t value) {
    slot stamp = {.rows = 1, .index_bytes = 8};
    if (!lane_claim(&writer, ALIGNMENT)) return 0;
    *claimed_word() = value;
    lane_commit(&writer, &stamp);
    return 1;
}

/* Takes a record and checks that it is number `sequence` with its own payload: 1, or 0 if there is none. */
static int take(lane_reader *from, uint64_t sequence, lane_found *found) {
    complaint why;
    int there = lane_next(from, found, &why);
    assert(there >= 0);
    if (!there) return 0;
    assert(found->body.sequence == sequence);
    assert(*(const uint64_t *)(from->data + found->body.extent_at) == sequence + 100);
    assert(lane_hand_out(from, found) == (from == &next_reader && sequence == 0));
    return 1;
}

static void release(lane_reader *from, const lane_found *found) {
    assert(*(const uint64_t *)(from->data + found->body.extent_at) == found->body.sequence + 100);
    lane_release(from, found->index, found->generation);
}

#if TEST == 1
/* commit, release, slot-body: records through reused slots are whole, in order, and nothing races */
#ifndef PUTS
#define PUTS 2
#endif
static void *first(void *unused) {
    for (uint64_t sent = 0, tries = 0; sent < PUTS && tries < PUTS + 1; tries++) sent += put(sent + 100);
    return unused;
}
static void *second(void *unused) {
    lane_found found;
    for (uint64_t taken = 0, tries = 0; tries < PUTS + 1; tries++)
        if (take(&reader, taken, &found)) release(&reader, &found), taken++;
    return unused;
}
static void before(void) {}
static void after(void) {}
#elif TEST == 2 /* hub-wake, bell: a hub that sleeps over a record is rung for */
static void *first(void *unused) {
    put(100);
    return unused;
}
static void *second(void *unused) {
    shm_u64 *tails[1] = {&lane.tail};
    uint64_t next[1] = {0};
    hub_watch watch = {.tails = tails, .next = next, .count = 1};
    int late;
    hub_sleep(&watch, &control, 1, &late);
    return unused;
}
static void before(void) {}
static void after(void) {}
#elif TEST == 3 /* space-wake, bell: a producer that sleeps although there is room is rung for */
static lane_found held;
static void *first(void *unused) {
    lane_note_outstanding(&writer);
    lane_wait_space(&writer, 1);
    return unused;
}
static void *second(void *unused) {
    release(&reader, &held);
    return unused;
}
static void before(void) {
    put(100);
    take(&reader, 0, &held);
}
static void after(void) {}
#elif TEST == 4
/* commit, slot-body, release: a new hub adopts while the producer goes on;
 * committed records come once, in order */
static lane_found held;
static void *first(void *unused) {
    put(101);
    put(102);
    return unused;
}
static uint64_t taken;
static void *second(void *unused) {
    lane_found found;
    complaint why;
    assert(lane_adopt(&next_reader, &why) == 0);
    for (taken = 0; taken < 3 && take(&next_reader, taken, &found); taken++) release(&next_reader, &found);
    return unused;
}
static void before(void) {
    put(100);
    take(&reader, 0, &held); /* the old hub dies with it */
}
static void after(void) {
    lane_found found;
    while (taken < load_seq64(&lane.tail)) {
        assert(take(&next_reader, taken, &found));
        release(&next_reader, &found);
        taken++;
    }
}
#elif TEST == 5
/* lane-ready: a reader that sees magic sees the header. The lines are those of format_lane and lane_reader_open */
static void *first(void *unused) {
    lane_header *header = &lane;
    header->slot_count = 7;
    store_release64(&header->magic, LANE_MAGIC); /* SYNC(lane-ready) */
    return unused;
}
static void *second(void *unused) {
    lane_reader *reader = &next_reader;
    /* SYNC(lane-ready) */
    if (load_acquire64(&reader->header->magic) == LANE_MAGIC) assert(reader->header->slot_count == 7);
    return unused;
}
static void before(void) {}
static void after(void) {}
#endif

int main(void) {
    pthread_t one, other;
    open_lane();
    before();
    pthread_create(&one, NULL, first, NULL);
    pthread_create(&other, NULL, second, NULL);
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    after();
    return 0;
}
