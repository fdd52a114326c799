"""A record under way: where in its extent everything will lie, and what its slot will say.

Knows layout.h and columns; how values become bytes is pack.pxi's. A Plan is for one record and one thread.
"""

cdef extern from "row_check.h" nogil:
    uint64_t next_checked(uint64_t number, uint32_t every)
    int row_checks_write(uint64_t* to, const uint8_t* values, uint64_t count, const uint32_t* lengths,
                         const uint8_t* valid, uint64_t rows, uint32_t item, uint64_t seed, uint64_t first,
                         uint32_t every)


cdef enum:
    SAID_NOTHING                     # the tokens' versions count, else the current version
    SAID_OLDEST                      # no token is older; the newest is the tokens'
    SAID_BOTH                        # every token is within


@cython.freelist(8)
cdef class Stamp:
    """What a caller says of a group beside its columns; already checked."""

    cdef readonly bytes group_id
    cdef readonly uint32_t group_size  # 0: as many rows as are given
    cdef readonly bint is_eval
    cdef int said                    # how much of the versions: SAID_NOTHING, SAID_OLDEST or SAID_BOTH
    cdef int64_t oldest
    cdef int64_t newest
    cdef int64_t created_ns          # when `put` or `claim` began

    def __init__(self, bytes group_id not None, uint32_t group_size, int64_t oldest, int64_t newest,
                 bint is_eval, int said=SAID_BOTH):
        self.group_id, self.group_size, self.is_eval = group_id, group_size, is_eval
        self.oldest, self.newest, self.said = oldest, newest, said
        self.created_ns = monotonic_ns()


cdef inline uint64_t lines(uint64_t size) noexcept:
    return (size + ALIGNMENT - 1) // ALIGNMENT


cdef class RowSampler:
    """Which of a producer's rows carry checks of their values: one in `every`, scattered; 1: all; 0: none."""

    cdef readonly uint32_t every     # 0: no row is checked
    cdef uint64_t _next

    def __init__(self, uint32_t every, uint64_t first=0):
        self.every, self._next = every, first

    cdef uint64_t take(self, uint64_t rows) noexcept:
        """Returns the number of the first of so many further rows."""
        self._next += rows
        return self._next - rows


cdef int check_columns(list columns) except -1:
    """Raises TypeError unless all are PackedColumns, which `column_at` believes."""
    for each in columns:
        if type(each) is not PackedColumn:
            raise TypeError(f"{each!r:.80} is not a PackedColumn")
    return 0


cdef inline PackedColumn column_at(list columns, Py_ssize_t place):
    return <PackedColumn>PyList_GET_ITEM(columns, place)


@cython.freelist(8)
cdef class Plan:
    """The layout of one record. Raises BeyondLayout for one too large for a directory, WrongLengths."""

    cdef readonly list columns
    cdef readonly Stamp stamp
    cdef readonly uint64_t extent_bytes
    cdef readonly object sequence    # of the committed record; None before
    cdef public bint done            # committed, or counted as dropped
    cdef public object source        # the group, to make the plan again
    cdef bint has_nulls              # some row of some column is None
    cdef bint worth_a_look           # a caller may have to be told something of the group: put/untrainable_notices.py
    cdef slot _slot
    cdef PackedColumn _versions            # token_versions, or None
    cdef uint64_t _first_row         # its number among the producer's rows
    cdef uint32_t _check_every       # which of them carry checks; 0: none of this record
    cdef PackedColumn _tokens
    cdef PackedColumn _ends                # step_ends, or None
    cdef PackedColumn _rewards             # step_rewards, or None
    cdef PackedColumn _prompts             # prompt_length, or None

    def __init__(self, list columns not None, Stamp stamp not None, uint32_t rows, uint64_t tokens,
                 bint uneven, int32_t env_id, source=None, RowSampler sampler=None):
        check_columns(columns)
        cdef PackedColumn column
        for column in columns:
            if column.tag == TAG_VALUES and column.entries != (1 if column.form.per_record else rows):
                if column.form.per_record or column.form.role == IS_TOKENS or not uneven:
                    raise WrongLengths(f"column {column.name!r} has {column.entries} entries for {rows} rows")
        self.lay_out(columns, stamp, rows, tokens, uneven, env_id, source, sampler)

    cdef int lay_out(self, list columns, Stamp stamp, uint32_t rows, uint64_t tokens, bint uneven,
                     int32_t env_id, object source, RowSampler sampler) except -1:
        cdef Py_ssize_t place, count = PyList_GET_SIZE(columns)
        cdef uint64_t at = lines(count * sizeof(directory_entry) + PyBytes_GET_SIZE(stamp.group_id))
        cdef PackedColumn column
        cdef Role role
        cdef bint is_masked = False
        self.columns, self.stamp, self.source = columns, stamp, source
        if sampler is not None and sampler.every:
            self._first_row = sampler.take(rows)
            if next_checked(self._first_row, sampler.every) - self._first_row < rows:
                self._check_every = sampler.every
        for place in range(count):
            column = column_at(columns, place)
            role = column.form.role
            if role == IS_TOKENS:
                self._tokens = column
            elif role == IS_MASK:
                is_masked |= column.tag == TAG_VALUES
            elif role == SAYS_VERSIONS:
                self._versions = column
            elif role == ENDS_STEPS:
                self._ends = column
            elif role == REWARDS_STEPS:
                self._rewards = column
            elif role == COUNTS_PROMPTS:
                self._prompts = column
                is_masked |= column.tag == TAG_VALUES
            elif role == SAYS_MORE:
                self.worth_a_look = True
            if column.row_lengths is not None:
                column.lengths_at = at
                at += lines(PyBytes_GET_SIZE(column.row_lengths))
            if column.inner_lengths is not None:
                column.inner_at = at
                at += lines(PyBytes_GET_SIZE(column.inner_lengths))
        if at >= 1 << 26:
            raise BeyondLayout(f"{at * ALIGNMENT} bytes of lengths; the layout ends at 4 GiB")
        self._slot.index_bytes = at * ALIGNMENT
        for place in range(count):
            column = column_at(columns, place)
            if column.count:
                column.values_at = at
                at += lines(column.count * column.form.item_bytes)
            if column.keys is not None and PyBytes_GET_SIZE(column.keys):
                column.keys_at = at
                at += lines(PyBytes_GET_SIZE(column.keys))
            if column.validity is not None:
                self.has_nulls = True
                column.validity_at = at
                at += lines(column.entries)
            if self._check_every and column.form.check_seed and column.entries and column.tag == TAG_VALUES:
                column.checks_at = at
                at += lines(8 * column.entries)
        self.extent_bytes = at * ALIGNMENT
        if at >= 1 << 32:
            raise BeyondLayout(f"a record of {self.extent_bytes} bytes; the layout ends at 256 GiB")
        self.worth_a_look |= not is_masked
        self._slot.rows, self._slot.columns, self._slot.tokens = rows, <uint32_t>count, tokens
        self._slot.group_id_bytes = <uint16_t>PyBytes_GET_SIZE(stamp.group_id)
        self._slot.flags = (SLOT_EVAL if stamp.is_eval else 0) | (SLOT_UNEVEN if uneven else 0)
        self._slot.min_policy_version, self._slot.max_policy_version = stamp.oldest, stamp.newest
        self._slot.group_size = stamp.group_size if stamp.group_size else rows
        self._slot.env_id = env_id
        self._slot.t_created_ns = stamp.created_ns
        return 0

    def become(self, Plan other not None):
        """Lays the record out as `other` is, which was made of the same source."""
        self.columns, self.extent_bytes, self._slot = other.columns, other.extent_bytes, other._slot
        self._first_row, self._check_every = other._first_row, other._check_every
        self._tokens, self._ends, self._rewards = other._tokens, other._ends, other._rewards
        self._prompts, self._versions = other._prompts, other._versions

    @property
    def rows(self) -> int:
        return self._slot.rows

    @property
    def tokens(self) -> int:
        return self._slot.tokens

    @property
    def index_bytes(self) -> int:
        return self._slot.index_bytes

    def place(self, LaneWriter writer not None):
        """Writes everything into the writer's open claim and publishes it.

        Raises BadValue or LossyMasks before anything is published; the caller aborts the claim then.
        """
        self.write_all(writer, writer._writer.claim_number)

    def put_into(self, LaneWriter writer not None):
        """Claims room, writes everything there, publishes it; False if there is no room: nothing happened.

        Raises BadValue or LossyMasks before anything is published, ClaimLost if another claim is open or this
        one was ended meanwhile; this claim, and no other, is given back then. No interrupt comes between the
        claim and its end.
        """
        return bool(self.claim_and_write(writer))

    cdef int claim_and_write(self, LaneWriter writer) except -1:
        cdef uint64_t number
        if not writer.begin(self.extent_bytes):
            return False
        number = writer._writer.claim_number
        try:
            self.write_all(writer, number)
        except BaseException:
            writer.give_back(number)
            raise
        return True

    cdef int write_all(self, LaneWriter writer, uint64_t number) except -1:
        cdef uint8_t* base = writer.claimed(number)
        cdef bint is_cold = writer._writer.claim_is_cold
        cdef const int32_t* tokens
        cdef PackedColumn column
        cdef Py_ssize_t place
        cdef uint64_t unrecorded = 0
        self.write_index(base)
        for place in range(PyList_GET_SIZE(self.columns)):
            column = column_at(self.columns, place)
            if column.folds is not None:
                tokens = <int32_t*>(base + column.folds.values_at * ALIGNMENT)
                fold_values(column, base + column.values_at * ALIGNMENT, tokens)
            elif column.rows is not None and column.count:
                unrecorded += write_values(column, base + column.values_at * ALIGNMENT, is_cold)
        if self._check_every:
            self.write_checks(base)
        lane_copies_done(is_cold)
        return self.publish(writer, number, base, unrecorded)

    cdef int publish(self, LaneWriter writer, uint64_t number, const uint8_t* base,
                     uint64_t unrecorded) except -1:
        """Checks what depends on several columns, then publishes the claim; counts log-probabilities that are
        not recorded.
        """
        if self._ends is not None:
            self.check_steps(base)
        if self._prompts is not None:
            self.check_prompts(base)
        if self._versions is not None:
            self.stamp_by_tokens(base)
        self.sequence = writer.publish(number, &self._slot)
        self.done = True
        if unrecorded:
            writer.count_unrecorded(unrecorded)
        return 0

    def begin(self, Claim claim not None):
        """Writes all but the values into the open claim."""
        self.write_index(claim.memory_here())

    def finish(self, Claim claim not None):
        """Checks values that were written in place, then publishes the claim. Raises BadValue, ClaimLost."""
        cdef uint8_t* base = claim.memory_here()
        cdef PackedColumn column
        cdef uint64_t unrecorded = 0
        for column in self.columns:
            unrecorded += check_column(column, base + column.values_at * ALIGNMENT)
        self.write_checks(base)
        self.publish(claim._writer, claim._number, base, unrecorded)

    cdef int write_checks(self, uint8_t* base) except -1:
        """The checks of the rows that carry some, of the values as they lie there now."""
        cdef PackedColumn column
        cdef const uint8_t* valid
        if not self._check_every:
            return 0
        for column in self.columns:
            if column.checks_at:
                valid = NULL
                if column.validity is not None:
                    valid = <const uint8_t*>PyBytes_AS_STRING(column.validity)
                if row_checks_write(
                    <uint64_t*>(base + column.checks_at * ALIGNMENT), base + column.values_at * ALIGNMENT,
                    column.count, <const uint32_t*>PyBytes_AS_STRING(column.row_lengths), valid, column.entries,
                    column.form.item_bytes, column.form.check_seed, self._first_row, self._check_every,
                ):
                    raise BadValue(column.name, 0, 0, column.count, "resized", int(column.lengths.sum()))
        return 0

    cdef int check_steps(self, const uint8_t* base) except -1:
        """Raises BadValue unless ends of steps rise within their tokens, one for each reward or none."""
        cdef const int32_t* end
        cdef const uint32_t* counts
        cdef const uint32_t* tokens
        cdef const uint32_t* rewards = NULL
        cdef int32_t last
        cdef uint32_t row, place
        if not self.is_per_row(self._ends):
            return 0
        end = <const int32_t*>(base + self._ends.values_at * ALIGNMENT)
        counts = <const uint32_t*>PyBytes_AS_STRING(self._ends.row_lengths)
        tokens = <const uint32_t*>PyBytes_AS_STRING(self._tokens.row_lengths)
        if self.is_per_row(self._rewards):
            rewards = <const uint32_t*>PyBytes_AS_STRING(self._rewards.row_lengths)
        for row in range(self._ends.entries):
            last = 0
            if rewards != NULL and counts[row] not in (0, rewards[row]) and is_valid(self._rewards, row):
                place = min(counts[row], rewards[row])
                raise BadValue("step_ends", row, place, counts[row], "count", rewards[row])
            for place in range(counts[row]):
                if end[place] <= last:
                    raise BadValue("step_ends", row, place, end[place], "order", last)
                last = end[place]
            if last > tokens[row]:
                raise BadValue("step_ends", row, counts[row] - 1, last, "beyond", tokens[row])
            end += counts[row]
        return 0

    cdef bint is_per_row(self, PackedColumn column) noexcept:
        """Whether the record has it, with a value for each of the tokens' rows."""
        return (column is not None and self._tokens is not None and column.tag == TAG_VALUES
                and column.entries == self._tokens.entries)

    cdef int check_prompts(self, const uint8_t* base) except -1:
        """A row's prompt is no longer than its tokens; -1 is an unknown one. BadValue."""
        cdef const int32_t* prompts
        cdef const uint32_t* tokens
        cdef uint32_t row
        if not self.is_per_row(self._prompts):
            return 0
        prompts = <const int32_t*>(base + self._prompts.values_at * ALIGNMENT)
        tokens = <const uint32_t*>PyBytes_AS_STRING(self._tokens.row_lengths)
        for row in range(self._prompts.entries):
            if prompts[row] < -1:
                raise BadValue("prompt_length", row, 0, prompts[row], "negative")
            if prompts[row] > 0 and <uint32_t>prompts[row] > tokens[row]:
                raise BadValue("prompt_length", row, 0, prompts[row], "beyond", tokens[row])
        return 0

    cdef int stamp_by_tokens(self, const uint8_t* base) except -1:
        """The versions of the tokens become the record's; BadValue if the caller has said otherwise."""
        cdef const int32_t* values
        cdef int32_t newest = -1
        cdef uint32_t oldest = 0xFFFFFFFF  # as which whatever is below 0, and says nothing, comes last
        cdef uint64_t place
        if not self._versions.count:
            return 0
        values = <const int32_t*>(base + self._versions.values_at * ALIGNMENT)
        for place in range(self._versions.count):
            oldest = min(oldest, <uint32_t>values[place])
            newest = max(newest, values[place])
        if newest < 0:
            return 0
        if self.stamp.said == SAID_NOTHING:
            self._slot.min_policy_version, self._slot.max_policy_version = oldest, newest
        elif oldest < self.stamp.oldest:
            raise self.contradicted(values, oldest, "older")
        elif self.stamp.said == SAID_OLDEST:
            self._slot.max_policy_version = max(self.stamp.oldest, newest)
        elif newest > self.stamp.newest:
            raise self.contradicted(values, newest, "newer")
        return 0

    cdef object contradicted(self, const int32_t* values, int64_t version, str reason):
        """The error of the first token of a version that the caller has excluded."""
        cdef uint64_t place = 0
        while values[place] != version:
            place += 1
        ends = np.cumsum(self._versions.lengths, dtype=np.int64)
        row = int(np.searchsorted(ends, place, "right"))
        position = place - int(ends[row - 1]) if row else place
        limit = self.stamp.oldest if reason == "older" else self.stamp.newest
        return BadValue(self._versions.name, row, position, version, reason, limit)

    def view(self, memory, PackedColumn column not None):
        """The column's values inside `memory` of the claim, as a flat array of its dtype."""
        dtype = column.form.dtype
        if not column.count:
            return np.empty(0, dtype)
        return np.frombuffer(memory, dtype, column.count, column.values_at * ALIGNMENT)

    cdef int write_index(self, uint8_t* base) except -1:
        """Directory, group id, lengths, keys and validity."""
        cdef directory_entry* entry = <directory_entry*>base
        cdef Py_ssize_t place, count = PyList_GET_SIZE(self.columns)
        cdef PackedColumn column
        memset(base, 0, count * sizeof(directory_entry))
        for place in range(count):
            column = column_at(self.columns, place)
            entry.column, entry.kind, entry.tag = <uint16_t>column.form.number, column.form.kind, column.tag
            entry.entries, entry.values_at = column.entries, <uint32_t>column.values_at
            entry.values_bytes = column.count * column.form.item_bytes
            entry.lengths_at, entry.inner_at = <uint32_t>column.lengths_at, <uint32_t>column.inner_at
            entry.keys_at, entry.validity_at = <uint32_t>column.keys_at, <uint32_t>column.validity_at
            entry.checks_at = <uint32_t>column.checks_at
            if column.row_lengths is not None:
                copy_bytes(base + column.lengths_at * ALIGNMENT, column.row_lengths)
            if column.inner_lengths is not None:
                entry.inner_count = PyBytes_GET_SIZE(column.inner_lengths) // 4
                copy_bytes(base + column.inner_at * ALIGNMENT, column.inner_lengths)
            if column.keys_at:
                entry.keys_bytes = PyBytes_GET_SIZE(column.keys)
                copy_bytes(base + column.keys_at * ALIGNMENT, column.keys)
            if column.validity_at:
                copy_bytes(base + column.validity_at * ALIGNMENT, column.validity)
            entry += 1
        copy_bytes(<uint8_t*>entry, self.stamp.group_id)
        return 0


cdef inline void copy_bytes(uint8_t* to, bytes source) noexcept:
    memcpy(to, PyBytes_AS_STRING(source), PyBytes_GET_SIZE(source))
