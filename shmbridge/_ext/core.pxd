"""The C core of c/ as the extensions see it: what more than one of them uses."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "atomics.h" nogil:
    ctypedef struct shm_u64:
        pass
    ctypedef struct shm_u32:
        pass

    uint64_t load_relaxed64(const shm_u64* word)
    uint64_t load_acquire64(const shm_u64* word)
    uint64_t load_seq64(const shm_u64* word)
    void store_relaxed64(shm_u64* word, uint64_t value)
    void store_release64(shm_u64* word, uint64_t value)
    void store_seq64(shm_u64* word, uint64_t value)
    void add_seq64(shm_u64* word, uint64_t count)
    uint32_t load_seq32(const shm_u32* word)
    void store_seq32(shm_u32* word, uint32_t value)
    void add_seq32(shm_u32* word)
    void store_release_words(shm_u64* to, const void* source, uint64_t count)
    void load_acquire_words(void* to, const shm_u64* source, uint64_t count)
    void cpu_relax()

cdef extern from "layout.h" nogil:
    enum:
        LAYOUT_VERSION
        PAGE
        ALIGNMENT
        MAX_COLUMNS
        COLUMN_NAME_BYTES
        CONTROL_BYTES
        KIND_SCALAR
        KIND_LIST
        KIND_LIST_LIST
        KIND_MAP
        KIND_BYTES
        TAG_VALUES
        TAG_NULL
        TAG_EMPTY_LIST
        TAG_EMPTY_MAP
        SLOT_EVAL
        SLOT_UNEVEN
        DISCARD_REASONS
        DISCARD_CORRUPT
        DROP_REASONS
        LOST_REASONS
        LATENCY_BUCKETS
        WEIGHTS_SLOTS
        WEIGHTS_WORDS
    const uint64_t LANE_MAGIC
    const uint64_t CONTROL_MAGIC
    const uint64_t WEIGHTS_MAGIC

    ctypedef struct column_def:
        char name[56]
        uint8_t kind
        uint8_t dtype
        uint8_t item_bytes
        uint8_t flags

    ctypedef struct control_header:
        shm_u64 magic
        uint32_t layout_version
        uint32_t creator_pid
        uint64_t created_ns
        uint64_t hub_pid
        uint64_t hub_pid_namespace
        shm_u64 hub_epoch
        shm_u64 run_epoch
        shm_u64 policy_version
        shm_u64 paused
        shm_u64 draining
        shm_u64 column_count
        shm_u64 published_ns
        shm_u64 handed_ns
        shm_u64 asking_ns
        shm_u64 batch_wait_ns
        shm_u64 tap_wait_ns
        shm_u32 hub_sleeping
        shm_u32 doorbell
        shm_u32 arrivals
        shm_u64 weights_floor
        shm_u64 latency_counts[30]
        shm_u64 latency_ns_total
        shm_u64 run_id
        shm_u64 run_open
        shm_u64 start_version
        shm_u64 start_same_as
        shm_u64 most_stale
        shm_u64 batch_wants
        shm_u64 batch_has

    ctypedef struct lane_header:
        shm_u64 magic
        uint32_t layout_version
        uint32_t producer_pid
        uint64_t pid_namespace
        uint64_t created_ns
        uint32_t slot_count
        uint32_t column_count
        uint64_t ring_at
        uint64_t slots_at
        uint64_t released_at
        uint64_t data_at
        uint64_t data_bytes
        uint64_t segment_bytes
        char producer_id[96]
        char env_name[128]
        char origin_node[64]
        char origin_producer_id[96]
        shm_u64 tail
        shm_u64 origin_newest[2]
        shm_u32 space_waiting
        shm_u64 bytes_total
        shm_u64 tokens_total
        shm_u64 wait_ns_total
        shm_u64 late_wakes_total
        shm_u64 dropped_total[4]
        shm_u64 wanted_bytes
        shm_u64 blocked_ns
        shm_u64 origin_open
        shm_u64 logprobs_unrecorded_total
        shm_u64 episodes_lost_total[3]
        shm_u64 head
        shm_u64 discarded_total[4]
        shm_u64 quarantined
        shm_u64 released_total
        shm_u64 leases_dropped
        shm_u64 releasing_generation
        shm_u64 releasing
        shm_u32 space_bell

    ctypedef struct slot:
        shm_u64 generation
        uint64_t sequence
        uint64_t extent_at
        uint64_t extent_bytes
        int64_t min_policy_version
        int64_t max_policy_version
        int64_t t_created_ns
        int64_t t_publish_ns
        uint64_t tokens
        uint32_t rows
        uint32_t columns
        int32_t group_size
        int32_t env_id
        uint16_t group_id_bytes
        uint16_t flags
        uint32_t index_bytes
        uint64_t origin_sequence
        int64_t origin_waited_ns
        int64_t origin_transfer_ns

    ctypedef struct directory_entry:
        uint16_t column
        uint8_t kind
        uint8_t tag
        uint32_t entries
        uint32_t values_at
        uint32_t lengths_at
        uint32_t inner_at
        uint32_t keys_at
        uint32_t validity_at
        uint32_t checks_at
        uint64_t values_bytes
        uint64_t inner_count
        uint64_t keys_bytes

    ctypedef struct weights_header:
        shm_u64 magic
        uint32_t layout_version
        uint32_t writer_pid
        uint64_t table_bytes
        uint64_t data_at
        uint64_t slot_bytes
        uint64_t tensors
        uint64_t words_at
        uint64_t segment_id
        shm_u64 latest
        shm_u64 slot_version[2]
        shm_u64 filling
        shm_u32 bell

cdef extern from "futex.h" nogil:
    int EINTR
    int64_t monotonic_ns()
    int futex_wait(shm_u32* word, uint32_t seen, int64_t timeout_ns)
    void futex_wake_all(shm_u32* word)
    void ring_bell(shm_u32* bell)

cdef extern from "faults.h" nogil:
    enum:
        FAULTS_COMPILED
    void fault_hit(const char* label) noexcept

cdef extern from "geometry.h" nogil:
    ctypedef struct complaint:
        char text[200]
    ctypedef struct lane_geometry:
        uint32_t slot_count
        uint32_t column_count
        uint64_t data_bytes
        uint64_t ring_at
        uint64_t slots_at
        uint64_t released_at
        uint64_t data_at
        uint64_t segment_bytes
    lane_geometry geometry_of(uint64_t data_bytes, uint32_t slot_count)
    int geometry_read(const lane_header* header, uint64_t size, lane_geometry* geometry, complaint* why)

cdef extern from "index.h" nogil:
    uint64_t index_sum(const uint32_t* lengths, uint64_t count)
    uint32_t index_tokens(const column_def* columns, uint32_t column_count)
    int index_check(const uint8_t* index, const slot* body, const column_def* columns, uint32_t column_count,
                    uint32_t tokens, complaint* why)

cdef extern from "lane_copy.h" nogil:
    void lane_copy(void* to, const void* source, uint64_t size, bint is_cold)
    void lane_copies_done(bint is_cold)

cdef extern from "row_check.h" nogil:
    uint64_t row_check_seed(const char* column)
