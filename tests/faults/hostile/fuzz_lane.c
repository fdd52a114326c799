/* A lane made of hostile bytes, read as the hub and as a learner rank read one, and gathered.
 * Any sanitizer report is a finding.
 *
 * The input is a compact lane (struct recipe below, made from real lanes by seeds.py) and a few patches, each
 * applied at a moment of its own: a peer writes while the reader reads. The lane lies in heap memory of
 * exactly its size; while a record is read, everything but its extent is poisoned. Knows the C core only,
 * nothing of Python.
 *
 *   libFuzzer:  clang -DWITH_LIBFUZZER -fsanitize=fuzzer,address,undefined -I shmbridge/_ext/c \
 *                   tests/faults/hostile/fuzz_lane.c
 *   anywhere:   gcc -fsanitize=address,undefined -I shmbridge/_ext/c tests/faults/hostile/fuzz_lane.c && \
 *                   ./a.out SECONDS SEED seed-files...
 */
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gather.h"
#include "lane_read.h"

#define MOST_FUZZED_SLOTS 16u
#define MOST_COLUMNS 64u
#define MOST_DATA_LINES 1024u
#define MOST_PATCHES 8u

enum { BEFORE_OPEN, OPENED, ADOPTED, FOUND, COPIED, CHECKED, HANDED_OUT, RELEASED, MOMENTS };

typedef struct {
    uint8_t moment, round, width_log2, relative;
    uint32_t at;
    uint64_t value;
} patch;

/* What an input begins with; then patches, columns, ring, slots, released words and data. */
typedef struct {
    uint8_t slots_log2, columns, patches, release_order;
    uint16_t data_lines, cut; /* cut: bytes that the segment is short of */
    uint64_t tail, head;
} recipe;

typedef struct {
    uint8_t *base;
    uint64_t size;
    const patch *patches;
    uint32_t patch_count, round;
} lane;

static volatile uint64_t sink;
static uint64_t records_read;

static void must(int truth, const char *what) {
    if (truth) return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

static void at_moment(lane *lane, int moment) {
    for (uint32_t i = 0; i < lane->patch_count; i++) {
        const patch *one = lane->patches + i;
        uint64_t width = 1ull << (one->width_log2 & 3), value = one->value, old = 0, at;
        if (one->moment % MOMENTS != moment || (one->round & 7) != (lane->round & 7) || lane->size < 8)
            continue;
        at = one->at % (lane->size - 7) & ~(width - 1);
        memcpy(&old, lane->base + at, width);
        if (one->relative & 1) value += old;
        memcpy(lane->base + at, &value, width);
    }
}

static void section(const uint8_t **from, const uint8_t *end, uint8_t *to, uint64_t size) {
    uint64_t there = (uint64_t)(end - *from) < size ? (uint64_t)(end - *from) : size;
    if (there) memcpy(to, *from, there);
    *from += there;
}

/* The lane that the input asks for, in memory of exactly its size, cut included. */
static void build(const uint8_t *input, size_t size, lane *lane, recipe *wish, patch *patches) {
    const uint8_t *from = input, *end = input + size;
    lane_header *header;
    lane_geometry geometry;
    uint8_t *whole;
    memset(wish, 0, sizeof *wish), memset(patches, 0, MOST_PATCHES * sizeof(patch));
    section(&from, end, (uint8_t *)wish, sizeof *wish);
    lane->patches = patches, lane->patch_count = wish->patches % (MOST_PATCHES + 1), lane->round = 0;
    section(&from, end, (uint8_t *)patches, lane->patch_count * sizeof(patch));
    geometry = geometry_of(wish->data_lines % (MOST_DATA_LINES + 1) * 64ull, 1u << wish->slots_log2 % 5);
    geometry.column_count = wish->columns % (MOST_COLUMNS + 1);
    whole = calloc(1, geometry.segment_bytes);
    header = (lane_header *)whole;
    header->magic = LANE_MAGIC;
    header->layout_version = LAYOUT_VERSION;
    header->slot_count = geometry.slot_count, header->column_count = geometry.column_count;
    header->data_bytes = geometry.data_bytes;
    header->ring_at = geometry.ring_at, header->slots_at = geometry.slots_at;
    header->released_at = geometry.released_at;
    header->data_at = geometry.data_at, header->segment_bytes = geometry.segment_bytes;
    header->tail = wish->tail;
    header->head = wish->head;
    section(&from, end, whole + PAGE, geometry.column_count * sizeof(column_def));
    section(&from, end, whole + geometry.ring_at, geometry.slot_count * sizeof(uint32_t));
    section(&from, end, whole + geometry.slots_at, geometry.slot_count * sizeof(slot));
    section(&from, end, whole + geometry.released_at, geometry.slot_count * sizeof(uint64_t));
    section(&from, end, whole + geometry.data_at, geometry.data_bytes);
    lane->size = geometry.segment_bytes;
    lane->size -= wish->cut < lane->size ? wish->cut : lane->size;
    if (posix_memalign((void **)&lane->base, PAGE, lane->size ? lane->size : 1)) abort();
    memcpy(lane->base, whole, lane->size);
    free(whole);
}

/* Makes all of the lane but `size` bytes at `at` forbidden to touch, or all of it allowed again. */
static void only(const lane *lane, uint64_t at, uint64_t size) {
    ASAN_POISON_MEMORY_REGION(lane->base, lane->size);
    ASAN_UNPOISON_MEMORY_REGION(lane->base + at, size);
}

static void all(const lane *lane) { ASAN_UNPOISON_MEMORY_REGION(lane->base, lane->size); }

static void touch(const uint8_t *bytes, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += bytes[i];
    sink += sum;
}

/* Reads what index_check has allowed, as record.py does: lengths in the copy, values,
 * validity and keys in place. */
static void read_record(const lane_reader *reader, const lane_found *found, const uint8_t *index) {
    const slot *body = &found->body;
    const uint8_t *extent = reader->data + body->extent_at;
    int has_tokens = reader->tokens == reader->geometry.column_count;
    must(body->rows > 0, "there are rows");
    must(body->columns * sizeof(directory_entry) + body->group_id_bytes <= body->index_bytes,
         "the group id is inside the index");
    touch(index + body->columns * sizeof(directory_entry), body->group_id_bytes);
    for (uint32_t i = 0; i < body->columns; i++) {
        const directory_entry *entry = (const directory_entry *)index + i;
        uint64_t rows = 0, inner = 0;
        must(entry->column < reader->geometry.column_count, "the column is in the table");
        if (entry->tag != TAG_VALUES) continue;
        has_tokens |= entry->column == reader->tokens && entry->entries == body->rows;
        if (reader->columns[entry->column].flags & COLUMN_PER_RECORD)
            must(entry->entries == 1, "one value per record");
        else must(entry->entries == body->rows || body->flags & SLOT_UNEVEN, "one value per row");
        if (entry->kind != KIND_SCALAR) {
            const uint32_t *lengths = (const uint32_t *)(index + entry->lengths_at * 64ull);
            touch((const uint8_t *)lengths, entry->entries * 4ull);
            for (uint32_t row = 0; row < entry->entries; row++) rows += lengths[row];
        }
        if (entry->kind == KIND_LIST_LIST || entry->kind == KIND_MAP) {
            const uint32_t *lengths = (const uint32_t *)(index + entry->inner_at * 64ull);
            must(rows == entry->inner_count, "as many inner lengths as the rows say");
            for (uint64_t row = 0; row < entry->inner_count; row++) inner += lengths[row];
        }
        if (entry->kind == KIND_MAP) {
            must(inner == entry->keys_bytes, "key lengths add up");
            if (entry->keys_bytes) touch(extent + entry->keys_at * 64ull, entry->keys_bytes);
        }
        if (reader->columns[entry->column].item_bytes) {
            uint64_t values = entry->kind == KIND_LIST_LIST ? inner : rows;
            uint64_t count = entry->kind == KIND_SCALAR ? entry->entries : values;
            must(entry->values_bytes / reader->columns[entry->column].item_bytes == count,
                 "as many values as the lengths say");
        }
        if (entry->values_bytes) touch(extent + entry->values_at * 64ull, entry->values_bytes);
        if (entry->validity_at) touch(extent + entry->validity_at * 64ull, entry->entries);
        if (entry->checks_at) touch(extent + entry->checks_at * 64ull, entry->entries * 8ull);
    }
    /* A lane whose table has no such column is refused
     * before its records are looked at: shmbridge/hub/lanes.py. */
    must(has_tokens || reader->tokens == reader->geometry.column_count, "a row of tokens for each row");
}

/* One column of a batch of this record twice over, into memory of exactly the size that was said. */
static void gather_one(const gather_record *records, gather_column *column, uint64_t width) {
    uint64_t rows = 2ull * records->rows, lists = 0, count = 0, item = column->item;
    if (column->per_token) count = width ? rows * width : 2 * records->tokens;
    else if (column->kind <= KIND_LIST_LIST && gather_total(records, 2, column, &lists, &count)) return;
    if (rows > 1 << 20 || lists > 1 << 20 || count > 1 << 22) return; /* Python finds no memory for more */
    column->width = width;
    column->present = malloc(rows);
    column->uneven = width ? NULL : malloc(rows); /* once wanted, once not */
    column->values = column->kind <= KIND_LIST_LIST ? malloc(count * item + !count) : NULL;
    column->lengths = column->kind != KIND_SCALAR && !column->per_token && column->values
                          ? malloc(rows * sizeof(uint32_t))
                          : NULL;
    column->inner = column->kind == KIND_LIST_LIST ? malloc(lists * sizeof(uint32_t) + !lists) : NULL;
    gather_copy(records, 2, column);
    touch(column->present, rows);
    if (column->uneven) touch(column->uneven, rows);
    if (column->values) touch(column->values, count * item);
    if (column->lengths)
        must(index_sum(column->lengths, rows) == (column->inner ? lists : count),
             "as many as the gathered lengths say");
    if (column->inner)
        must(index_sum(column->inner, lists) == count, "as many values as the gathered inner lengths say");
    free(column->present), free(column->uneven), free(column->values);
    free(column->lengths), free(column->inner);
}

/* Gathers every column of the lane, in each form that its kind has, as gather.pxi does. */
static void gather_record_twice(const lane_reader *reader, const lane_found *found, const uint8_t *index) {
    const slot *body = &found->body;
    gather_record both[2] = {{.index = index, .entries = body->columns, .rows = body->rows}};
    both->extent = reader->data + body->extent_at;
    const directory_entry *tokens = gather_find(both, (int32_t)reader->tokens);
    uint64_t longest = 0;
    if (!tokens) return;
    both->lengths = gather_lengths(both, tokens->lengths_at);
    both->tokens = index_sum(both->lengths, both->rows);
    for (uint32_t row = 0; row < both->rows; row++)
        longest = both->lengths[row] > longest ? both->lengths[row] : longest;
    both[1] = both[0];
    for (int32_t number = 0; number < (int32_t)reader->geometry.column_count; number++) {
        const column_def *def = &reader->columns[number];
        gather_column column = {&number, def->item_bytes, def->kind, def->flags & COLUMN_PER_RECORD};
        if (!def->item_bytes) continue; /* no type of schema.py */
        gather_one(both, &column, 0);
        column.per_token = def->kind == KIND_LIST && !column.per_record;
        if (column.per_token) gather_one(both, &column, 0), gather_one(both, &column, longest);
    }
}

/* Copies the index, checks it, reads the record. Whether it is one. */
static int take_index(lane *lane, const lane_reader *reader, const lane_found *found) {
    complaint why;
    const slot *body = &found->body;
    uint8_t *index = malloc(body->index_bytes ? body->index_bytes : 1);
    int good;
    must((reader->data - lane->base) + body->extent_at + body->extent_bytes <= lane->size,
         "the extent is inside the segment");
    only(lane, (uint64_t)(reader->data - lane->base) + body->extent_at, body->extent_bytes);
    memcpy(index, reader->data + body->extent_at, body->index_bytes);
    all(lane);
    at_moment(lane, COPIED);
    good = !index_check(index, body, reader->columns, reader->geometry.column_count, reader->tokens, &why);
    at_moment(lane, CHECKED);
    if (good) {
        only(lane, (uint64_t)(reader->data - lane->base) + body->extent_at, body->extent_bytes);
        read_record(reader, found, index);
        gather_record_twice(reader, found, index);
        records_read++;
        all(lane);
    }
    free(index);
    return good;
}

static void read_lane(lane *lane, const recipe *wish) {
    lane_reader reader;
    lane_found found, held[2 * MOST_FUZZED_SLOTS];
    complaint why;
    uint32_t count = 0;
    at_moment(lane, BEFORE_OPEN);
    if (lane_reader_open(&reader, lane->base, lane->size, &why)) {
        lane_reader_close(&reader);
        return;
    }
    at_moment(lane, OPENED);
    if (lane_adopt(&reader, &why)) {
        must(why.text[0] != 0, "memory");
        lane_reader_close(&reader);
        return;
    }
    at_moment(lane, ADOPTED);
    for (; count < 2 * MOST_FUZZED_SLOTS && lane_next(&reader, &found, &why) > 0; count++, lane->round++) {
        at_moment(lane, FOUND);
        if (!take_index(lane, &reader, &found)) break;
        sink += (uint64_t)lane_hand_out(&reader, &found) + lane_waiting(&reader);
        at_moment(lane, HANDED_OUT);
        held[count] = found;
        if (wish->release_order & 1) lane_release(&reader, found.index, found.generation);
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t which = wish->release_order & 2 ? count - 1 - i : i;
        lane_release(&reader, held[which].index, held[which].generation);
        at_moment(lane, RELEASED);
    }
    for (uint32_t i = 0; i < 4; i++) /* a rank, with a manifest that may be wrong */
        if (lane_look(&reader, (wish->release_order >> 2) + i, wish->head + i, &found, &why) == 0)
            take_index(lane, &reader, &found);
    lane_reader_close(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    lane lane;
    recipe wish;
    patch patches[MOST_PATCHES];
    build(input, size, &lane, &wish, patches);
    read_lane(&lane, &wish);
    free(lane.base);
    return 0;
}

#ifndef WITH_LIBFUZZER
#include "mutate.h"
#endif
