/* Checks whether a record's index is true, on a private copy: directory, group id, all lengths.
 *
 * After this the copy's offsets and lengths may be used as indices into the record's extent. Values are not
 * looked at: they may change, and nothing is computed from them. Plain C without Python, for fuzzing.
 */
#ifndef SHMBRIDGE_INDEX_H
#define SHMBRIDGE_INDEX_H

#include <string.h>

#include "geometry.h"

static inline uint64_t index_sum(const uint32_t *lengths, uint64_t count) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) total += lengths[i];
    return total;
}

/* Whether `size` bytes at line `line` lie between begin and end. */
static inline int index_span(uint64_t line, uint64_t size, uint64_t begin, uint64_t end, const char *what,
                             uint32_t column, complaint *why) {
    uint64_t at = line * ALIGNMENT;
    if (at < begin || at > end || size > end - at)
        return complain(why, "column %u: %s %" PRIu64 "+%" PRIu64 " is outside %" PRIu64 "..%" PRIu64, column,
                        what, at, size, begin, end);
    return 0;
}

/* Lengths, inner lengths and keys of one column that has them; stores the number of its values. */
static inline int index_lengths(const uint8_t *index, const directory_entry *entry, uint64_t head,
                                const slot *body, uint64_t *values, complaint *why) {
    uint64_t size = body->index_bytes, innermost;
    uint32_t column = entry->column;
    if (index_span(entry->lengths_at, entry->entries * 4ull, head, size, "lengths", column, why)) return -1;
    *values = index_sum((const uint32_t *)(index + entry->lengths_at * (uint64_t)ALIGNMENT), entry->entries);
    if (entry->kind != KIND_LIST_LIST && entry->kind != KIND_MAP) return 0;
    if (entry->inner_count != *values || entry->inner_count > size)
        return complain(why,
                        "column %u: %" PRIu64 " inner lengths for %" PRIu64
                        " entries, in an index of %" PRIu64 " bytes",
                        column, entry->inner_count, *values, size);
    if (index_span(entry->inner_at, entry->inner_count * 4, head, size, "inner lengths", column, why))
        return -1;
    innermost = index_sum((const uint32_t *)(index + entry->inner_at * (uint64_t)ALIGNMENT),
                          entry->inner_count);
    if (entry->kind == KIND_LIST_LIST) {
        *values = innermost;
        return 0;
    }
    if (entry->keys_bytes != innermost)
        return complain(why, "column %u: keys of %" PRIu64 " bytes, lengths say %" PRIu64, column,
                        entry->keys_bytes, innermost);
    return entry->keys_bytes
               ? index_span(entry->keys_at, entry->keys_bytes, size, body->extent_bytes, "keys", column, why)
               : 0;
}

/* The number of the column that every record has, column_count if the lane has none. */
static inline uint32_t index_tokens(const column_def *columns, uint32_t column_count) {
    for (uint32_t column = 0; column < column_count; column++)
        if (!strncmp(columns[column].name, "tokens", COLUMN_NAME_BYTES))
            return columns[column].kind == KIND_LIST && !(columns[column].flags & COLUMN_PER_RECORD)
                       ? column
                       : column_count;
    return column_count;
}

/* Whether a column has as many entries as it must: one per row, or one; uneven records are flagged as such,
 * but not in their tokens. */
static inline int index_entries(const directory_entry *entry, const slot *body, const column_def *column,
                                int is_tokens) {
    if (column->flags & COLUMN_PER_RECORD) return entry->entries == 1;
    return entry->entries == body->rows || (body->flags & SLOT_UNEVEN && !is_tokens);
}

/* 0, or -1 and why. `index` holds body->index_bytes bytes, 8-byte aligned;
 * `columns` is the reader's own copy of the lane's table. */
static inline int index_check(const uint8_t *index, const slot *body, const column_def *columns,
                              uint32_t column_count, uint32_t tokens, complaint *why) {
    uint64_t head = body->columns * (uint64_t)sizeof(directory_entry) + body->group_id_bytes;
    uint64_t values, seen[MAX_COLUMNS / 64] = {0};
    if (body->columns > column_count || head > body->index_bytes || body->rows < 1 || body->rows > 1u << 30)
        return complain(why, "%u columns, %u rows, group id of %u in an index of %u bytes", body->columns,
                        body->rows, body->group_id_bytes, body->index_bytes);
    for (uint32_t i = 0; i < body->columns; i++) {
        const directory_entry *entry = (const directory_entry *)index + i;
        uint32_t column = entry->column;
        if (column >= column_count || entry->kind != columns[column].kind || entry->tag > TAG_EMPTY_MAP)
            return complain(why, "entry %u: column %u kind %u tag %u", i, column, entry->kind, entry->tag);
        if (seen[column / 64] >> column % 64 & 1)
            return complain(why, "entry %u: column %u for a second time", i, column);
        if (entry->tag != TAG_VALUES) {
            if (entry->entries || entry->values_bytes || entry->inner_count || entry->keys_bytes ||
                entry->validity_at || entry->checks_at)
                return complain(why, "entry %u: an empty column with values", i);
            continue;
        }
        seen[column / 64] |= 1ull << column % 64;
        if (!index_entries(entry, body, &columns[column], column == tokens))
            return complain(why, "column %u: %u entries for %u rows", column, entry->entries, body->rows);
        values = entry->entries;
        if (entry->kind != KIND_SCALAR && index_lengths(index, entry, head, body, &values, why)) return -1;
        if (values > body->extent_bytes || entry->values_bytes != values * columns[column].item_bytes)
            return complain(why, "column %u: %" PRIu64 " bytes for %" PRIu64 " values", column,
                            entry->values_bytes, values);
        if (entry->values_bytes &&
            index_span(entry->values_at, entry->values_bytes, body->index_bytes, body->extent_bytes,
                       "values", column, why))
            return -1;
        if (entry->validity_at &&
            index_span(entry->validity_at, entry->entries, body->index_bytes, body->extent_bytes,
                       "validity", column, why))
            return -1;
        if (entry->checks_at &&
            index_span(entry->checks_at, entry->entries * 8ull, body->index_bytes, body->extent_bytes,
                       "checks", column, why))
            return -1;
    }
    if (tokens < column_count && !(seen[tokens / 64] >> tokens % 64 & 1))
        return complain(why, "a record without tokens");
    return 0;
}

#endif
