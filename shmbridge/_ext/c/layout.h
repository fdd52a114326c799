/* The bytes of a bridge: control segment, lane segment, slot, column directory. The single source;
 * core.pxd mirrors it.
 *
 * Little-endian, 64-bit monotone positions, roles on their own 128-byte lines (adjacent-line prefetch,
 * 128-byte lines on some Arm). "P" is written by the lane's producer only, "H" by the hub holding the hub
 * lock only, "W" by the holder of the writer's lock of the weights segment that has the name, "A" is only
 * added to atomically.
 *
 *   control segment                          lane segment
 *   0x0000 +---------------------------+     0x0000 +------------------------------------+
 *          | identity (creator, once)  |            | identity P, once; magic last       |
 *   0x0100 | hub words               H |     0x0200 | tail                             P |
 *   0x0180 | hub_sleeping            H |     0x0280 | space_waiting, producer counters P |
 *   0x0200 | doorbell                A |     0x0300 | head, hub counters               H |
 *   0x0280 | arrivals                A |     0x0400 | space_bell                       A |
 *   0x0300 | weights_floor           W |     0x1000 | column table            P, once    |
 *   0x0380 | latency, for observers  H |     ring   | uint32 slot numbers [slot_count] P |
 *   0x0480 | training run            H |            |                                    |
 *   0x1000 | hub's column table      H |     slots  | 128-byte slots      [slot_count] P |
 *   0x5000 +---------------------------+     rel    | uint64 released     [slot_count] H |
 *                                            data   | extents, 64-byte aligned, on pages
 *                                                   | of their own: readers map read-only P |
 *                                                   +------------------------------------+
 */
#ifndef SHMBRIDGE_LAYOUT_H
#define SHMBRIDGE_LAYOUT_H

#include <stddef.h>
#include "atomics.h"

#define LAYOUT_VERSION 2u
#define LANE_MAGIC 0x31454e414c424853ull    /* "SHBLANE1" */
#define CONTROL_MAGIC 0x314c525443424853ull /* "SHBCTRL1" */
#define PAGE 4096u
#if defined(__x86_64__)
#define DATA_PAGE PAGE /* data can be mapped by other rights than the words before it */
#else
#define DATA_PAGE 65536u /* the largest page that kernels of aarch64 have */
#endif
#define ALIGNMENT 64u
#define MAX_COLUMNS 256u
#define COLUMN_NAME_BYTES 56u
#define RELEASING_SLOT_BITS 24
#define MOST_SLOTS (1u << RELEASING_SLOT_BITS)
#define CONTROL_BYTES (PAGE + MAX_COLUMNS * 64u)
#define LATENCY_BUCKETS 30u /* number i: below 2^i microseconds; the last one: all others */

/* Kinds of column; what lengths, inner and keys mean for each is beside directory_entry. */
enum { KIND_SCALAR = 0, KIND_LIST = 1, KIND_LIST_LIST = 2, KIND_MAP = 3, KIND_BYTES = 4 };

/* What stands in the whole column: Atropos tells null, [] and {} apart. */
enum { TAG_VALUES = 0, TAG_NULL = 1, TAG_EMPTY_LIST = 2, TAG_EMPTY_MAP = 3 };

enum { SLOT_EVAL = 1, SLOT_UNEVEN = 2 };
enum { COLUMN_PER_RECORD = 1, COLUMN_TEXT = 2 };

/* Reasons of discarded_total[]; their names are in shmbridge/errors.py. Never renumbered. */
enum {
    DISCARD_STALE = 0, DISCARD_PARTIAL = 1, DISCARD_RESUME = 2, DISCARD_CORRUPT = 3, DISCARD_REASONS = 4
};
/* Reasons of dropped_total[]: never committed. */
enum { DROP_FULL = 0, DROP_CANCELLED = 1, DROP_INVALID = 2, DROP_TIMEOUT = 3, DROP_REASONS = 4 };
/* Reasons of episodes_lost_total[]: played in vain, never in a group. */
enum { LOST_FAILED = 0, LOST_LATE = 1, LOST_TOO_OLD = 2, LOST_REASONS = 3 };

typedef struct {
    char name[COLUMN_NAME_BYTES]; /* UTF-8, zero padded */
    uint8_t kind;
    uint8_t dtype;      /* shmbridge/schema.py DTYPES index of the values */
    uint8_t item_bytes; /* size of one value */
    uint8_t flags;      /* COLUMN_PER_RECORD: one entry, not one per row; COLUMN_TEXT: UTF-8 */
    uint32_t reserved;
} column_def;

typedef struct {
    shm_u64 magic; /* stored last: present means whole */
    uint32_t layout_version;
    uint32_t creator_pid;
    uint64_t created_ns; /* CLOCK_MONOTONIC */
    uint8_t pad0[0x100 - 24];

    uint64_t hub_pid; /* H: plain; for messages, and whether to wait for its lock */
    uint64_t hub_pid_namespace;
    shm_u64 hub_epoch;
    shm_u64 run_epoch;
    shm_u64 policy_version; /* biased by one: 0 means none announced */
    shm_u64 paused;
    shm_u64 draining; /* 1: takes no new records; 2: and every learner rank is done */
    shm_u64 column_count; /* H: stored after the table, 0 means not yet */
    /* H: for observers only; CLOCK_MONOTONIC, 0: not yet. Earlier hubs leave them 0 */
    shm_u64 published_ns; /* of the newest policy version */
    shm_u64 handed_ns;    /* when a batch or record was handed out last */
    shm_u64 asking_ns;    /* since when somebody waits for one; 0: nobody does */
    /* H: for observers only, of this hub. Earlier hubs leave them 0 */
    shm_u64 batch_wait_ns; /* how long somebody waited for a batch or record, in all */
    shm_u64 tap_wait_ns;   /* how long a tap that records kept the hub waiting, in all */
    uint8_t pad1[0x80 - 104];

    shm_u32 hub_sleeping; /* H */
    uint8_t pad2[0x80 - 4];
    shm_u32 doorbell; /* A */
    uint8_t pad3[0x80 - 4];
    shm_u32 arrivals; /* A: a lane became ready */
    uint8_t pad4[0x80 - 4];
    /* W: highest version of weights segments that were replaced, + 1; 0: none was. Only rises */
    shm_u64 weights_floor;
    uint8_t pad5[0x80 - 8];
    /* H: for observers only, of this hub: records by the time from their commit until they were first handed
     * out, and the sum of those times. Earlier hubs leave them 0 */
    shm_u64 latency_counts[LATENCY_BUCKETS];
    shm_u64 latency_ns_total;
    uint8_t pad6[0x100 - 8 * (LATENCY_BUCKETS + 1)];
    /* H: the training run that the policy versions are of. Earlier hubs leave all of it 0 */
    shm_u64 run_id; /* 0: unknown */
    shm_u64 run_open; /* 1: its learner has not ended in order; what it has trained stays for another */
    shm_u64 start_version; /* with which its newest learner started, + 1 */
    shm_u64 start_same_as; /* the version whose weights that one repeats, + 1; 0: untrained weights */
    /* H: for observers only, of this hub. Earlier hubs leave them 0 */
    shm_u64 most_stale;  /* + 1: the staleness limit of the batches asked for last; 0: no limit */
    shm_u64 batch_wants; /* size of the batch that is waited for * 2 + whether that counts rows; 0: of none */
    shm_u64 batch_has;   /* groups or rows of it that are there << 32 | groups that are there in part */
    uint8_t pad7[PAGE - 0x480 - 56];
} control_header;

typedef struct {
    shm_u64 magic; /* P: stored last */
    uint32_t layout_version;
    uint32_t producer_pid;
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    uint64_t created_ns;
    uint32_t slot_count; /* power of two */
    uint32_t column_count;
    uint64_t ring_at, slots_at, released_at, data_at; /* byte offsets in the segment */
    uint64_t data_bytes;
    uint64_t segment_bytes;
    char producer_id[96]; /* the user's prefix, at most 63 bytes, and the incarnation; NUL at the end */
    char env_name[128];
    /* P, once: of records that a relay brought from another node: that node, and the producer there that put
     * them; NUL at the end. Else 0 */
    char origin_node[64];
    char origin_producer_id[96];
    uint8_t pad0[0x200 - 472];

    shm_u64 tail; /* P: records committed; the commit point */
    /* P: of the record under this number's parity: the sequence + 1 of the last record at its origin that this
     * lane, or one before it, has. So `tail - 1` finds what is committed while another is under way. Else 0 */
    shm_u64 origin_newest[2];
    uint8_t pad1[0x80 - 24];
    shm_u32 space_waiting; /* P */
    uint32_t pad2;
    shm_u64 bytes_total, tokens_total, wait_ns_total, late_wakes_total; /* P */
    shm_u64 dropped_total[DROP_REASONS];                                /* P */
    shm_u64 wanted_bytes; /* P: bytes that the last claim failed to get, 0 if it succeeded; a hint */
    /* P: since when the producer waits for room or the end of a pause, CLOCK_MONOTONIC; 0: it does not */
    shm_u64 blocked_ns;
    /* P: 1: the node of origin may send records again, or a producer here goes on later where this one ends, so
     * a receipt for the last one is left when the lane is removed; 0 when all of them are known there to be
     * committed, and in all other lanes */
    shm_u64 origin_open;
    /* P: values of inference_logprobs and ref_logprobs that say "not recorded". Earlier producers leave it 0 */
    shm_u64 logprobs_unrecorded_total;
    /* P: episodes that its environment began, and that are in no record. Earlier producers leave it 0 */
    shm_u64 episodes_lost_total[LOST_REASONS];
    uint8_t pad3[0x80 - 8 - 64 - 8 * DROP_REASONS - 8 * LOST_REASONS];
    shm_u64 head; /* H: records that may have been handed out */
    shm_u64 discarded_total[DISCARD_REASONS];
    /* H: 0, or how many records were given up with the lane, 1 at least; not among discarded_total */
    shm_u64 quarantined;
    /* H: releases, of discarded records too; one behind at most after a hub's death,
     * until the next hub adopts */
    shm_u64 released_total;
    /* H: leases that ended without a word, whose records stay un-released; of this hub */
    shm_u64 leases_dropped;
    shm_u64 releasing_generation; /* H: of the release under way, or the last one */
    shm_u64 releasing;            /* H: what released_total will be then << RELEASING_SLOT_BITS | its slot */
    uint8_t pad4[0x100 - 48 - 8 * DISCARD_REASONS];
    shm_u32 space_bell; /* A */
    uint8_t pad5[PAGE - 0x400 - 4];
} lane_header;

/* P, written before `generation`. A slot is free exactly if released[i] == generation. */
typedef struct {
    shm_u64 generation; /* P: + 1 per commit, never on abort */
    uint64_t sequence;
    uint64_t extent_at;    /* relative to data_at, 64-byte aligned */
    uint64_t extent_bytes; /* whole 64-byte lines */
    int64_t min_policy_version, max_policy_version; /* -1: not stamped */
    int64_t t_created_ns, t_publish_ns;
    uint64_t tokens;
    uint32_t rows;
    uint32_t columns; /* directory entries at the start of the extent */
    int32_t group_size;
    int32_t env_id;          /* -1: none */
    uint16_t group_id_bytes; /* after the directory, 64-byte aligned */
    uint16_t flags;
    uint32_t index_bytes; /* directory + group id + all lengths: copied before it is believed */
    uint64_t origin_sequence;   /* + 1: the record's at its origin; 0: it came from no other node */
    int64_t origin_waited_ns;   /* from its commit there until it was sent, by the clock there */
    int64_t origin_transfer_ns; /* from the request until it was committed here, by the clock here */
    uint8_t reserved[8];
} slot;

/* One per present column, at the start of the extent. Places are
 * in 64-byte lines from the extent's start; 0 means absent.
 *
 *   kind       values                      lengths[entries]   inner[inner_count]        keys
 *   SCALAR     entries * item              -                  -                         -
 *   LIST       sum(lengths) * item         values per row     -                         -
 *   LIST_LIST  sum(inner) * item           lists per row      values per inner list     -
 *   MAP        sum(lengths) * item         pairs per row      bytes per key             key bytes
 *   BYTES      sum(lengths)                bytes per row      -                         -
 *
 * validity, where present, is one byte per entry: 0 means null. checks, where present, is one uint64 per
 * entry: row_check.h, 0 means none.
 */
typedef struct {
    uint16_t column; /* index in the lane's column table */
    uint8_t kind;
    uint8_t tag;
    uint32_t entries;
    uint32_t values_at, lengths_at, inner_at, keys_at, validity_at, checks_at;
    uint64_t values_bytes, inner_count, keys_bytes;
    uint64_t reserved;
} directory_entry;

/* Weights segment: this header, the table (JSON: name, dtype, shape, offset, bytes; the same for every slot),
 * words per tensor, then the slots.
 *
 *   table    PAGE            JSON, once; magic last                                     writer
 *   words    8-byte aligned  written[tensors]: bytes written in the filling under way  A, zeroed by writer
 *            per slot        stamp[tensors]: version + 1 that last changed it, 0: torn  writer
 *                            not_finite[tensors]: 1 where a value is NaN or infinite    writer and its parts
 *   slots    a page          tensors, 64-byte aligned                                   writer and its parts
 */
#define WEIGHTS_MAGIC 0x3254485757424853ull /* "SHBWWHT2" */
#define WEIGHTS_SLOTS 2u
#define WEIGHTS_WORDS (1u + 2u * WEIGHTS_SLOTS) /* per tensor */

typedef struct {
    shm_u64 magic; /* stored last */
    uint32_t layout_version;
    uint32_t writer_pid; /* writer: plain; for messages, and whether to wait for its lock */
    uint64_t table_bytes, data_at, slot_bytes;
    uint64_t tensors, words_at;
    uint64_t segment_id; /* random: tickets of another segment of this name are refused */
    uint8_t pad0[0x80 - 64];
    /* writer: 0 none yet, else (version + 1) * WEIGHTS_SLOTS + slot; the commit point */
    shm_u64 latest;
    shm_u64 slot_version[WEIGHTS_SLOTS];  /* writer: version + 1, 0 while the slot is being filled */
    uint8_t pad1[0x80 - 8 - 8 * WEIGHTS_SLOTS];
    /* writer: (number * WEIGHTS_SLOTS + slot) * 2 + 1 while parts are let in; the number never comes again */
    shm_u64 filling;
    uint8_t pad2[0x80 - 8];
    shm_u32 bell; /* A: there is another version */
    uint8_t pad3[PAGE - 0x180 - 4];
} weights_header;

_Static_assert(sizeof(weights_header) == PAGE, "weights_header");
_Static_assert(offsetof(weights_header, latest) == 0x80, "latest");
_Static_assert(offsetof(weights_header, filling) == 0x100, "filling");
_Static_assert(offsetof(weights_header, bell) == 0x180, "weights bell");
_Static_assert(sizeof(column_def) == 64, "column_def");
_Static_assert(sizeof(control_header) == PAGE, "control_header");
_Static_assert(offsetof(control_header, hub_pid) == 0x100, "hub words");
_Static_assert(offsetof(control_header, hub_sleeping) == 0x180, "hub_sleeping");
_Static_assert(offsetof(control_header, doorbell) == 0x200, "doorbell");
_Static_assert(offsetof(control_header, arrivals) == 0x280, "arrivals");
_Static_assert(offsetof(control_header, weights_floor) == 0x300, "weights_floor");
_Static_assert(offsetof(control_header, latency_counts) == 0x380, "latency_counts");
_Static_assert(offsetof(control_header, run_id) == 0x480, "run_id");
_Static_assert(sizeof(lane_header) == PAGE, "lane_header");
_Static_assert(offsetof(lane_header, tail) == 0x200, "tail");
_Static_assert(offsetof(lane_header, space_waiting) == 0x280, "space_waiting");
_Static_assert(offsetof(lane_header, head) == 0x300, "head");
_Static_assert(offsetof(lane_header, space_bell) == 0x400, "space_bell");
_Static_assert(sizeof(slot) == 128, "slot");
_Static_assert(sizeof(directory_entry) == 64, "directory_entry");

#endif
