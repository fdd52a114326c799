"""A mapped segment, and the words that tell of it: identity and counters of a lane, and the words of a control
segment, for any reader.

The protocol of claims and leases is lane_write.h and lane_read.h. None of this is on the path of a record: it is
compiled for size.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EMFILE, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ,
    PROT_WRITE, mlock, mmap, munmap,
)
from posix.stat cimport fstat, struct_stat
from posix.types cimport off_t
from posix.unistd cimport _SC_PAGESIZE, close, sysconf

from shmbridge._ext.core cimport (
    CONTROL_BYTES, CONTROL_MAGIC, DISCARD_REASONS, DROP_REASONS, FAULTS_COMPILED, LANE_MAGIC, LATENCY_BUCKETS,
    LAYOUT_VERSION, LOST_REASONS, MAX_COLUMNS, PAGE, column_def, complaint, control_header, fault_hit,
    geometry_of, geometry_read, lane_header, load_acquire64, load_acquire_words, load_relaxed64, load_seq32,
    load_seq64, monotonic_ns, ring_bell, shm_u64, slot, store_relaxed64, store_release64, store_release_words,
    store_seq32, store_seq64,
)
from shmbridge._ext.core cimport lane_geometry as geometry

include "mapping.pxi"

cdef uint64_t FINISHED = 2
cdef int LOOKS = 8

faults_compiled = bool(FAULTS_COMPILED)
layout_version = LAYOUT_VERSION
control_bytes = CONTROL_BYTES


class LaneCorrupt(Exception):
    """What a lane says of itself cannot be true; the reader quarantines it."""


def fault(bytes label not None):
    """Passes a labelled fail-point of Python code; nothing unless built with SHMBRIDGE_FAULTS."""
    fault_hit(label)


def lane_geometry(uint64_t data_bytes, uint32_t slot_count):
    """Places of ring, slots, released words and data, and the segment's size, all in bytes."""
    cdef geometry places = geometry_of(data_bytes, slot_count)
    return places.ring_at, places.slots_at, places.released_at, places.data_at, places.segment_bytes


def format_lane(Mapping lane not None, uint64_t data_bytes, uint32_t slot_count, bytes columns not None,
                uint32_t column_count, uint32_t pid, uint64_t pid_namespace, bytes producer_id not None,
                bytes env_name not None, bytes origin_node=b"", bytes origin_producer_id=b"",
                uint64_t origin_newest=0):
    """Writes the header of an empty, locked, reserved lane, magic last. For its producer.

    A lane with an origin begins with `origin_open` set; `origin_newest` is the sequence + 1 of the last record
    there that an earlier lane had, 0 if none did. ValueError for an origin that does not fit.
    """
    cdef lane_header* header = <lane_header*>lane.base
    ring_at, slots_at, released_at, data_at, total = lane_geometry(data_bytes, slot_count)
    if lane.size < total or column_count > MAX_COLUMNS or len(columns) != column_count * sizeof(column_def):
        raise ValueError("lane geometry does not fit its segment")
    if (len(origin_node) >= sizeof(header.origin_node)
            or len(origin_producer_id) >= sizeof(header.origin_producer_id)):
        raise ValueError(f"origin {origin_node!r}, {origin_producer_id!r} is too long for a lane")
    header.layout_version = LAYOUT_VERSION
    header.producer_pid = pid
    header.pid_namespace = pid_namespace
    header.created_ns = monotonic_ns()
    header.slot_count = slot_count
    header.column_count = column_count
    header.ring_at, header.slots_at = ring_at, slots_at
    header.released_at, header.data_at = released_at, data_at
    header.data_bytes = data_bytes
    header.segment_bytes = total
    memcpy(header.producer_id, PyBytes_AS_STRING(producer_id),
           min(len(producer_id), sizeof(header.producer_id) - 1))
    memcpy(header.env_name, PyBytes_AS_STRING(env_name), min(len(env_name), 127))
    memcpy(header.origin_node, PyBytes_AS_STRING(origin_node), len(origin_node))
    memcpy(header.origin_producer_id, PyBytes_AS_STRING(origin_producer_id), len(origin_producer_id))
    store_relaxed64(&header.origin_open, len(origin_producer_id) > 0)
    store_relaxed64(&header.origin_newest[1], origin_newest)  # where no record stands before the first
    memcpy(lane.base + PAGE, PyBytes_AS_STRING(columns), len(columns))
    fault_hit(b"lane.before_magic")
    store_release64(&header.magic, LANE_MAGIC)  # SYNC(lane-ready)
    fault_hit(b"lane.after_magic")


def read_lane(Mapping lane not None):
    """Copies a lane's header into a dict; None while it is not ready: to be mapped again. Validates only sizes.

    A lane is not ready before its magic, nor in a mapping made while its producer reserved it: that one ends
    before the lane does. LaneCorrupt if it is not a lane. One that says more bytes than its segment has is
    garbage, which its readers find.
    """
    cdef lane_header* header = <lane_header*>lane.base
    cdef uint64_t magic, total
    if lane.size < PAGE + MAX_COLUMNS * sizeof(column_def):
        return None
    magic = load_acquire64(&header.magic)  # SYNC(lane-ready)
    if magic == 0:
        return None
    if magic != LANE_MAGIC:
        raise LaneCorrupt(f"magic {magic:#x}, not a lane")
    if header.layout_version == LAYOUT_VERSION:
        total = header.segment_bytes
        # The magic is stored when the segment has its whole size: it has grown since, or says what is not true.
        if lane.size < total <= lane.segment_size():
            return None
    count = min(header.column_count, MAX_COLUMNS)
    return {
        "layout_version": header.layout_version, "pid": header.producer_pid,
        "pid_namespace": header.pid_namespace, "created_ns": header.created_ns,
        "slot_count": header.slot_count, "data_bytes": header.data_bytes,
        "segment_bytes": header.segment_bytes,
        "producer_id": (
            header.producer_id[:sizeof(header.producer_id)].split(b"\0")[0].decode("utf-8", "replace")),
        "env_name": header.env_name[:128].split(b"\0")[0].decode("utf-8", "replace"),
        "origin_node": (
            header.origin_node[:sizeof(header.origin_node)].split(b"\0")[0].decode("utf-8", "replace")),
        "origin_producer_id": (
            header.origin_producer_id[:sizeof(header.origin_producer_id)].split(b"\0")[0]
            .decode("utf-8", "replace")),
        "origin_open": load_relaxed64(&header.origin_open) != 0,
        "columns": PyBytes_FromStringAndSize(<char*>lane.base + PAGE, count * sizeof(column_def)),
    }


def origin_open(Mapping lane not None):
    """Whether the node from which a relay brought the lane's records may send some of them again."""
    return lane.alive() and load_relaxed64(&(<lane_header*>lane.base).origin_open) != 0


def close_origin(Mapping lane not None):
    """The origin of a ready lane will send nothing again. For the holder of its producer's lock."""
    if lane.alive():
        store_relaxed64(&(<lane_header*>lane.base).origin_open, 0)


def lane_counters(Mapping lane not None):
    """Counters of a lane from its own words, as a dict of ints; safe for anyone at any time."""
    cdef lane_header* header = <lane_header*>lane.base
    if not lane.alive():
        raise BufferError("the lane was mapped before fork")
    return {
        "tail": load_acquire64(&header.tail), "head": load_acquire64(&header.head),
        "bytes": load_relaxed64(&header.bytes_total), "tokens": load_relaxed64(&header.tokens_total),
        "wait_ns": load_relaxed64(&header.wait_ns_total),
        "blocked_ns": load_relaxed64(&header.blocked_ns),
        "late_wakes": load_relaxed64(&header.late_wakes_total),
        "logprobs_unrecorded": load_relaxed64(&header.logprobs_unrecorded_total),
        "quarantined": load_relaxed64(&header.quarantined),
        "released": load_relaxed64(&header.released_total),
        "leases_dropped": load_relaxed64(&header.leases_dropped),
        "dropped": [load_relaxed64(&header.dropped_total[i]) for i in range(DROP_REASONS)],
        "discarded": [load_relaxed64(&header.discarded_total[i]) for i in range(DISCARD_REASONS)],
        "episodes_lost": [load_relaxed64(&header.episodes_lost_total[i]) for i in range(LOST_REASONS)],
    }


def undelivered(Mapping lane not None):
    """Number of committed, un-released records of a lane without a writer; 0 if it was never ready."""
    return load(lane).get("held", 0)


def unreleased(Mapping lane not None):
    """Sequences of a lane's committed, un-released records, in no order; none of one that never became ready.

    Of a lane in use: each record is in it that was committed before this call,
    and is not released while it runs.
    """
    cdef list found = []
    load(lane, found)
    return found


def load(Mapping lane not None, list held_sequences=None):
    """What an observer wants to know of a lane's records, as a dict of ints; empty before it is ready.

    `held`, `held_bytes`: committed and un-released records, and what they take of `data_bytes`;
    `slot_count`; `oldest_ns`: when the oldest of them was committed, 0 if there is none; `newest_ns`,
    `newest_version`: when the newest record was committed, and its smallest policy version (-1: none), also
    if it was released since; 0 if there is none. CLOCK_MONOTONIC. Appends the sequences of the held records
    to `held_sequences`. LaneCorrupt if the header cannot be true. Anyone, at any time.
    """
    cdef lane_header* header = <lane_header*>lane.base
    cdef uint64_t tail, generation, sequence, held = 0, held_bytes = 0, newest = 0
    cdef int64_t published, oldest_ns = 0, newest_ns = 0, newest_version = -1
    cdef uint32_t i
    cdef bint is_held
    cdef slot* slots
    cdef shm_u64* released
    cdef geometry places
    cdef complaint why
    if read_lane(lane) is None:
        return {}
    if geometry_read(header, lane.size, &places, &why):
        raise LaneCorrupt(why.text.decode())
    slots = <slot*>(lane.base + places.slots_at)
    released = <shm_u64*>(lane.base + places.released_at)
    tail = load_acquire64(&header.tail)  # SYNC(commit)
    for i in range(places.slot_count):
        generation = load_acquire64(&slots[i].generation)  # SYNC(slot-body)
        # before the body: if the slot is written again meanwhile, its sequence is beyond `tail`
        is_held = generation != load_acquire64(&released[i])  # SYNC(release)
        sequence, published = slots[i].sequence, slots[i].t_publish_ns
        if generation == 0 or sequence >= tail:
            continue  # never used, or being written
        if sequence >= newest:
            newest, newest_ns, newest_version = sequence, published, slots[i].min_policy_version
        if is_held:
            held += 1
            held_bytes += slots[i].extent_bytes
            if held_sequences is not None:
                held_sequences.append(sequence)
            if oldest_ns == 0 or published < oldest_ns:
                oldest_ns = published
    return {
        "held": held, "held_bytes": min(held_bytes, header.data_bytes), "data_bytes": header.data_bytes,
        "slot_count": places.slot_count, "oldest_ns": oldest_ns, "newest_ns": newest_ns,
        "newest_version": newest_version,
    }


def newest_origin(Mapping lane not None):
    """The sequence at its origin of the last record that this lane, or one before it, has; None if none has.

    None too before the lane is ready. Exact when it is read, whatever its producer does, or did when it died.
    LaneCorrupt if the lane never stands still. Anyone, at any time.
    """
    cdef lane_header* header = <lane_header*>lane.base
    cdef uint64_t tail, newest
    if read_lane(lane) is None:
        return None
    for _ in range(LOOKS << 16):  # each commit that comes between needs another
        tail = load_acquire64(&header.tail)  # SYNC(commit)
        newest = load_acquire64(&header.origin_newest[(tail - 1) & 1])  # SYNC(origin-newest)
        if tail == load_acquire64(&header.tail):  # SYNC(commit)
            return newest - 1 if newest else None
    raise LaneCorrupt("its tail never stands still")


def releases(Mapping lane not None):
    """Released records of a lane: (as its hub counted them, as its slots' own words show them);
    (0, 0) before it is ready.

    What its slots show is None if in none of eight looks at all of them the lane stood still: it is busy, and
    the next call may tell. The two are equal whenever the lane is at rest; after a hub's death the
    count may be one behind until the next hub adopts the lane. Anything else is a record that was lost, or
    released past the count. LaneCorrupt if the header cannot be true. Anyone, at any time.
    """
    cdef lane_header* header = <lane_header*>lane.base
    cdef uint64_t tail, counted = 0
    unreleased = undelivered(lane)
    if unreleased == 0 and read_lane(lane) is None:
        return 0, 0
    for _ in range(LOOKS):  # words that change are read again
        tail, counted = load_acquire64(&header.tail), load_relaxed64(&header.released_total)  # SYNC(commit)
        unreleased = undelivered(lane)
        # SYNC(commit)
        if counted == load_relaxed64(&header.released_total) and tail == load_acquire64(&header.tail):
            return counted, tail - unreleased
    return counted, None


cdef class Control:
    """The words of a control segment.

    Setters are for the holder of the hub lock, but of `weights_floor`; getters for anyone; none blocks.
    """

    cdef readonly Mapping mapping
    cdef control_header* _words

    def __cinit__(self, Mapping mapping not None):
        if mapping.size < CONTROL_BYTES:
            raise ValueError("control segment too small")
        self.mapping = mapping
        self._words = <control_header*>mapping.base

    cdef control_header* words(self) except NULL:
        """The words, or BufferError in a child of fork, where they are not mapped."""
        if not self.mapping.alive():
            raise BufferError("the bridge was entered before fork")
        return self._words

    def format(self, uint32_t pid):
        """Makes an empty segment a control segment; magic last. Under the initialisation lock."""
        self.words().layout_version = LAYOUT_VERSION
        self.words().creator_pid = pid
        self.words().created_ns = monotonic_ns()
        fault_hit(b"control.before_magic")
        store_release64(&self.words().magic, CONTROL_MAGIC)  # SYNC(control-ready)

    @property
    def ready(self) -> bool:
        magic = load_acquire64(&self.words().magic)  # SYNC(control-ready)
        if magic not in (0, CONTROL_MAGIC):
            raise LaneCorrupt(f"magic {magic:#x}, not a control segment")
        return magic != 0

    @property
    def layout_version(self) -> int:
        return self.words().layout_version

    @property
    def created_ns(self) -> int:
        return self.words().created_ns

    def enter(self, uint64_t pid, uint64_t pid_namespace):
        """Names the holder of the hub lock; for messages only."""
        self.words().hub_pid, self.words().hub_pid_namespace = pid, pid_namespace

    def begin_epoch(self, uint64_t pid, uint64_t pid_namespace, bytes columns not None):
        """A new hub enters: its pid and columns, flags cleared, epoch + 1. Returns the epoch."""
        count = len(columns) // sizeof(column_def)
        if count > MAX_COLUMNS:
            raise ValueError(f"{count} columns, at most {MAX_COLUMNS}")
        store_release64(&self.words().column_count, 0)  # SYNC(hub-columns)
        table = <shm_u64*>(self.mapping.base + PAGE)
        # SYNC(hub-columns)
        store_release_words(table, PyBytes_AS_STRING(columns), count * sizeof(column_def) // 8)
        self.words().hub_pid, self.words().hub_pid_namespace = pid, pid_namespace
        store_seq32(&self.words().hub_sleeping, 0)
        store_relaxed64(&self.words().paused, 0)
        store_relaxed64(&self.words().draining, 0)
        store_relaxed64(&self.words().handed_ns, 0)
        store_relaxed64(&self.words().asking_ns, 0)
        store_relaxed64(&self.words().batch_wait_ns, 0)
        store_relaxed64(&self.words().tap_wait_ns, 0)
        for i in range(LATENCY_BUCKETS):
            store_relaxed64(&self.words().latency_counts[i], 0)
        store_relaxed64(&self.words().latency_ns_total, 0)
        store_relaxed64(&self.words().most_stale, 0)
        store_relaxed64(&self.words().batch_wants, 0)
        store_relaxed64(&self.words().batch_has, 0)
        epoch = load_relaxed64(&self.words().hub_epoch) + 1
        store_seq64(&self.words().hub_epoch, epoch)  # SYNC(epoch)
        # SYNC(hub-columns): after the epoch, so that an old count cannot pass for it
        store_release64(&self.words().column_count, count)
        return epoch

    @property
    def columns(self) -> bytes:
        """The hub's column table; empty if no hub has been here, or while one is writing it."""
        epoch = self.hub_epoch
        count = load_acquire64(&self.words().column_count)  # SYNC(hub-columns)
        table = PyBytes_FromStringAndSize(NULL, min(count, MAX_COLUMNS) * sizeof(column_def))
        # SYNC(hub-columns)
        load_acquire_words(PyBytes_AS_STRING(table), <shm_u64*>(self.mapping.base + PAGE), len(table) // 8)
        still = load_acquire64(&self.words().column_count) == count  # SYNC(hub-columns)
        return table if still and self.hub_epoch == epoch else b""

    @property
    def hub_pid(self) -> int:
        return self.words().hub_pid

    @property
    def hub_pid_namespace(self) -> int:
        return self.words().hub_pid_namespace

    @property
    def hub_epoch(self) -> int:
        return load_seq64(&self.words().hub_epoch)  # SYNC(epoch)

    @property
    def run_epoch(self) -> int:
        return load_acquire64(&self.words().run_epoch)  # SYNC(flags)

    def next_run(self):
        store_release64(&self.words().run_epoch, load_relaxed64(&self.words().run_epoch) + 1)  # SYNC(flags)

    @property
    def policy_version(self) -> int:
        """The newest announced policy version, -1 if none was."""
        return <int64_t>load_acquire64(&self.words().policy_version) - 1  # SYNC(flags)

    @policy_version.setter
    def policy_version(self, int64_t version):
        store_release64(&self.words().policy_version, version + 1)  # SYNC(flags)
        store_relaxed64(&self.words().published_ns, monotonic_ns())

    @property
    def run_id(self) -> int:
        """The training run that the policy versions are of, 0 if unknown."""
        return load_acquire64(&self.words().run_id)  # SYNC(flags)

    @property
    def start(self) -> tuple:
        """The version with which the newest learner started, and the version whose weights that one repeats;
        -1 for none, and for untrained weights.
        """
        version = <int64_t>load_acquire64(&self.words().start_version) - 1  # SYNC(flags)
        return version, <int64_t>load_acquire64(&self.words().start_same_as) - 1  # SYNC(flags)

    def begin_run(self, uint64_t run_id, int64_t version, int64_t same_as):
        """Stores a learner's run and start, before it publishes that version."""
        store_release64(&self.words().start_version, 0)  # SYNC(flags)
        store_release64(&self.words().start_same_as, same_as + 1)  # SYNC(flags)
        fault_hit(b"hub.start_changing")
        store_release64(&self.words().run_id, run_id)  # SYNC(flags)
        store_release64(&self.words().run_open, 1)  # SYNC(flags)
        store_release64(&self.words().start_version, version + 1)  # SYNC(flags)
        fault_hit(b"hub.start_stored")

    @property
    def run_open(self) -> bool:
        """Whether a learner of the run has started, and none has ended in order since."""
        return load_acquire64(&self.words().run_open) != 0  # SYNC(flags)

    def end_run(self):
        """The run's learner ends in order: what it has trained is saved."""
        store_release64(&self.words().run_open, 0)  # SYNC(flags)

    @property
    def published_ns(self) -> int:
        """When the newest policy version was announced, CLOCK_MONOTONIC; 0 if unknown."""
        return load_relaxed64(&self.words().published_ns)

    @property
    def handed_ns(self) -> int:
        """When this hub last handed a batch or record out, CLOCK_MONOTONIC; 0 if it has not."""
        return load_relaxed64(&self.words().handed_ns)

    def note_handed(self):
        """Notes that a batch or record is handed out now."""
        store_relaxed64(&self.words().handed_ns, monotonic_ns())

    @property
    def asking_ns(self) -> int:
        """Since when somebody waits for a batch or record, CLOCK_MONOTONIC; 0 if nobody does."""
        return load_relaxed64(&self.words().asking_ns)

    def note_asking(self, bint waits):
        """Notes that somebody begins to wait for a batch or record, or no longer does; adds up the time."""
        cdef control_header* words = self.words()
        if waits:
            store_relaxed64(&words.batch_wants, 0)  # of an earlier wait
        cdef uint64_t now = monotonic_ns(), since = load_relaxed64(&words.asking_ns)
        store_relaxed64(&words.asking_ns, now if waits else 0)
        if since:
            store_relaxed64(&words.batch_wait_ns, load_relaxed64(&words.batch_wait_ns) + now - since)

    @property
    def batch_wait_ns(self) -> int:
        """How long somebody waited for a batch or record since this hub began, without a wait under way."""
        return load_relaxed64(&self.words().batch_wait_ns)

    @property
    def tap_wait_ns(self) -> int:
        """How long a tap that records kept this hub waiting."""
        return load_relaxed64(&self.words().tap_wait_ns)

    def note_tap_wait(self, uint64_t waited_ns):
        """Adds to the time that a tap kept this hub waiting."""
        store_relaxed64(&self.words().tap_wait_ns, load_relaxed64(&self.words().tap_wait_ns) + waited_ns)

    @property
    def latency(self) -> tuple:
        """Records of this hub by the time from their commit until they were first handed out: count `i` is of
        less than 2**i microseconds, the last one of all others. And the sum of those times, in ns.
        Of records taken one by one without a wait, one in eight is counted.
        """
        cdef control_header* words = self.words()
        counts = [load_relaxed64(&words.latency_counts[i]) for i in range(LATENCY_BUCKETS)]
        return counts, load_relaxed64(&words.latency_ns_total)

    @property
    def most_stale(self) -> int:
        """The staleness limit, in versions, of the batches asked for last; -1: there is none."""
        return <int64_t>load_relaxed64(&self.words().most_stale) - 1

    def note_most_stale(self, int64_t versions):
        """Notes the staleness limit of the batches that are asked for; -1: there is none."""
        store_relaxed64(&self.words().most_stale, versions + 1)

    @property
    def batch(self) -> tuple:
        """What is known of the batch that is waited for: its size, whether that counts rows, how much of it is
        there, and groups that are there in part. A size of 0: of none.
        """
        cdef uint64_t wants = load_relaxed64(&self.words().batch_wants)
        cdef uint64_t has = load_relaxed64(&self.words().batch_has)
        return wants >> 1, bool(wants & 1), has >> 32, has & 0xFFFFFFFF

    def note_batch(self, uint64_t size, bint by_rows, uint64_t there, uint64_t in_part):
        """Notes what `batch` returns; a size of 0: none is waited for, or nothing is known of it."""
        store_relaxed64(&self.words().batch_has, min(there, 0xFFFFFFFF) << 32 | min(in_part, 0xFFFFFFFF))
        store_relaxed64(&self.words().batch_wants, size << 1 | by_rows)

    @property
    def paused(self) -> bool:
        return load_acquire64(&self.words().paused) != 0  # SYNC(flags)

    @paused.setter
    def paused(self, bint value):
        store_release64(&self.words().paused, value)  # SYNC(flags)

    @property
    def draining(self) -> bool:
        return load_acquire64(&self.words().draining) != 0  # SYNC(flags)

    @draining.setter
    def draining(self, bint value):
        store_release64(&self.words().draining, value)  # SYNC(flags)

    @property
    def finished(self) -> bool:
        """Whether a hub has drained the bridge and seen every learner rank done; until the next hub."""
        return load_acquire64(&self.words().draining) == FINISHED  # SYNC(flags)

    def finish(self):
        store_release64(&self.words().draining, FINISHED)  # SYNC(flags)

    @property
    def arrivals(self) -> int:
        return load_seq32(&self.words().arrivals)  # SYNC(bell)

    @property
    def weights_floor(self) -> int:
        """Highest version of the weights segments that were replaced, -1 if none was."""
        cdef object word = load_acquire64(&self.words().weights_floor)  # SYNC(weights-floor)
        return word - 1

    def raise_weights_floor(self, int64_t version):
        """Stores the floor if it is lower. Under the writer's lock of the named weights segment."""
        if load_acquire64(&self.words().weights_floor) < <uint64_t>version + 1:  # SYNC(weights-floor)
            store_release64(&self.words().weights_floor, <uint64_t>version + 1)  # SYNC(weights-floor)
        fault_hit(b"weights.floor_raised")

    def announce_lane(self):
        """Tells the hub that a lane became ready, and wakes it."""
        ring_bell(&self.words().arrivals)
        ring_bell(&self.words().doorbell)

    def ring(self):
        """Wakes the hub if it sleeps."""
        ring_bell(&self.words().doorbell)
