/* Many leased records into the arrays of one batch: each column
 * of each record is found in its index, and copied once.
 *
 * Indices are the private copies that index_check has found true; from the lane itself only values are read,
 * and nothing is computed from them. Plain C without Python, so that copying needs no GIL; gather.pxi binds
 * it and owns all memory. Knows no names and no dtypes.
 */
#ifndef SHMBRIDGE_GATHER_H
#define SHMBRIDGE_GATHER_H

#include "index.h"

typedef struct {
    const uint8_t *extent; /* in place */
    const uint8_t *index;  /* private copy, checked */
    uint64_t tokens;
    uint32_t entries; /* of the directory */
    uint32_t rows;
    uint32_t table;          /* which column table its numbers mean */
    const uint32_t *lengths; /* of its rows' tokens, in the index */
} gather_record;

/* One column of the batch: where it is in each table, and what its arrays are. */
typedef struct {
    const int32_t *numbers; /* per table, -1: not there */
    uint32_t item;          /* bytes of a value */
    uint8_t kind, per_record, per_token;
    uint64_t width;           /* per_token: values of a row, padded; 0: packed */
    uint8_t *present;         /* [rows] */
    uint8_t *uneven;          /* [rows] that the column does not fit; NULL: not wanted */
    uint8_t *values;          /* NULL: only `present` is wanted */
    uint32_t *lengths, *inner; /* [rows] of lists, [lists] of lists of lists */
} gather_column;

/* A record's part of a joined column: its rows, lists and values, and how often each is repeated. */
typedef struct {
    uint64_t rows, lists, values, times;
} gather_share;

static inline const uint32_t *gather_lengths(const gather_record *record, uint32_t line) {
    return (const uint32_t *)(record->index + line * (uint64_t)ALIGNMENT);
}

/* The record's entry of a column, NULL if it has no values of it. */
static inline const directory_entry *gather_find(const gather_record *record, int32_t number) {
    const directory_entry *directory = (const directory_entry *)record->index;
    for (uint32_t i = 0; i < record->entries; i++)
        if (directory[i].column == number && directory[i].tag == TAG_VALUES) return &directory[i];
    return NULL;
}

/* Rows of the column that are rows of the record; an uneven one has more, or fewer. */
static inline uint64_t gather_rows(const gather_record *record, const directory_entry *entry) {
    return entry->entries < record->rows ? entry->entries : record->rows;
}

static inline gather_share gather_measure(const gather_record *record, const directory_entry *entry,
                                          const gather_column *column) {
    gather_share share = {.rows = column->per_record ? 1 : gather_rows(record, entry),
                          .times = column->per_record ? record->rows : 1};
    int whole = share.rows == entry->entries;
    if (column->kind == KIND_SCALAR) {
        share.values = share.rows;
    } else if (column->kind == KIND_LIST) {
        share.values = whole ? entry->values_bytes / column->item
                             : index_sum(gather_lengths(record, entry->lengths_at), share.rows);
    } else {
        share.lists = whole ? entry->inner_count
                            : index_sum(gather_lengths(record, entry->lengths_at), share.rows);
        share.values = whole ? entry->values_bytes / column->item
                             : index_sum(gather_lengths(record, entry->inner_at), share.lists);
    }
    return share;
}

/* Lists and values that all records have of a joined column. 0, or -1 if no machine can hold so many. */
static inline int gather_total(const gather_record *records, uint64_t count, const gather_column *column,
                               uint64_t *lists, uint64_t *values) {
    *lists = *values = 0;
    for (uint64_t i = 0; i < count; i++) {
        const directory_entry *entry = gather_find(&records[i], column->numbers[records[i].table]);
        if (!entry) {
            *values += column->kind == KIND_SCALAR ? records[i].rows : 0;
            continue;
        }
        gather_share share = gather_measure(&records[i], entry, column);
        if (column->kind == KIND_SCALAR) share.values = records[i].rows, share.times = 1;
        if (__builtin_mul_overflow(share.values, share.times, &share.values) ||
            __builtin_add_overflow(*values, share.values, values) ||
            __builtin_mul_overflow(share.lists, share.times, &share.lists) ||
            __builtin_add_overflow(*lists, share.lists, lists))
            return -1;
    }
    return *values > INT64_MAX / 8 || *lists > INT64_MAX / 8 ? -1 : 0;
}

/* Copies `size` bytes to a cursor and moves it; a place without bytes is not looked at. */
static inline void gather_put(uint8_t **to, const uint8_t *from, uint64_t size) {
    if (size) memcpy(*to, from, size);
    *to += size;
}

static inline void gather_zero(uint8_t **to, uint64_t size) {
    if (size) memset(*to, 0, size);
    *to += size;
}

static inline int gather_is_uneven(const gather_record *record, const directory_entry *entry,
                                   int per_record) {
    return entry && !per_record && entry->entries != record->rows;
}

/* Rows that carry the column: it reaches them, and they are not null there. `uneven`: of a column with more
 * rows or fewer than the record. */
static inline void gather_present(const gather_record *record, const directory_entry *entry, int per_record,
                                  uint8_t *to, uint8_t *uneven) {
    uint64_t rows = !entry ? 0 : per_record ? record->rows : gather_rows(record, entry);
    const uint8_t *valid = entry && entry->validity_at
                               ? record->extent + entry->validity_at * (uint64_t)ALIGNMENT
                               : NULL;
    for (uint64_t row = 0; row < rows; row++) to[row] = !valid || valid[per_record ? 0 : row];
    if (record->rows > rows) memset(to + rows, 0, record->rows - rows);
    if (uneven && record->rows) memset(uneven, gather_is_uneven(record, entry, per_record), record->rows);
}

/* One value per token, or none at all: a row of another length than its tokens is absent,
 * since it is unknown which value belongs to which row. */
static inline void gather_fit(const gather_record *record, const directory_entry *entry, int per_record,
                              uint8_t *present, uint8_t *uneven) {
    int all_uneven = gather_is_uneven(record, entry, per_record);
    const uint32_t *lengths = entry ? gather_lengths(record, entry->lengths_at) : NULL;
    for (uint64_t row = 0; entry && row < record->rows; row++) {
        int is_uneven = all_uneven || (present[row] && lengths[row] != record->lengths[row]);
        if (uneven) uneven[row] = (uint8_t)is_uneven;
        present[row] &= !is_uneven;
    }
}

/* The values of the rows that are present, zero in the others. */
static inline void gather_per_token(const gather_record *record, const directory_entry *entry,
                                    const gather_column *column, const uint8_t *present, uint8_t **to) {
    const uint8_t *from = entry ? record->extent + entry->values_at * (uint64_t)ALIGNMENT : NULL;
    const uint32_t *lengths = entry ? gather_lengths(record, entry->lengths_at) : NULL;
    uint64_t entries = entry ? entry->entries : 0, item = column->item;
    if (!column->width && entry && !memchr(present, 0, record->rows)) {
        gather_put(to, from, record->tokens * item);
        return;
    }
    for (uint64_t row = 0; row < record->rows; row++) {
        uint64_t tokens = record->lengths[row], taken = present[row] ? tokens : 0;
        gather_put(to, from, taken * item);
        gather_zero(to, ((column->width ? column->width : tokens) - taken) * item);
        from += (row < entries ? lengths[row] : 0) * item;
    }
}

/* Scalars and lists, row after row; rows that an uneven record lacks are zero, or empty. */
static inline void gather_joined(const gather_record *record, const directory_entry *entry,
                                 const gather_column *column, uint8_t **values, uint8_t **lengths,
                                 uint8_t **inner) {
    gather_share share = entry ? gather_measure(record, entry, column) : (gather_share){0};
    for (uint64_t time = 0; time < share.times; time++) {
        gather_put(values, record->extent + entry->values_at * (uint64_t)ALIGNMENT,
                   share.values * column->item);
        if (column->lengths)
            gather_put(lengths, record->index + entry->lengths_at * (uint64_t)ALIGNMENT,
                       share.rows * sizeof(uint32_t));
        if (column->inner)
            gather_put(inner, record->index + entry->inner_at * (uint64_t)ALIGNMENT,
                       share.lists * sizeof(uint32_t));
    }
    uint64_t lacking = record->rows - share.rows * share.times;
    if (column->lengths) gather_zero(lengths, lacking * sizeof(uint32_t));
    else gather_zero(values, lacking * column->item);
}

/* Fills the arrays of one column, which have the sizes that gather_total said. */
static inline void gather_copy(const gather_record *records, uint64_t count, const gather_column *column) {
    uint8_t *present = column->present, *uneven = column->uneven, *values = column->values,
            *lengths = (uint8_t *)column->lengths, *inner = (uint8_t *)column->inner;
    for (uint64_t i = 0; i < count; i++) {
        const gather_record *record = &records[i];
        const directory_entry *entry = gather_find(record, column->numbers[record->table]);
        gather_present(record, entry, column->per_record, present, uneven);
        if (column->per_token) gather_fit(record, entry, column->per_record, present, uneven);
        if (column->per_token) gather_per_token(record, entry, column, present, &values);
        else if (column->values) gather_joined(record, entry, column, &values, &lengths, &inner);
        present += record->rows;
        if (uneven) uneven += record->rows;
    }
}

/* 0, 1, 2, ... for each row; `width` as in gather_column. */
static inline void gather_positions(const int32_t *lengths, uint64_t rows, uint64_t width, int32_t *to) {
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t length = lengths[row], room = width ? width : length;
        for (uint64_t i = 0; i < length; i++) to[i] = (int32_t)i;
        if (room > length) memset(to + length, 0, (room - length) * sizeof *to);
        to += room;
    }
}

#endif
