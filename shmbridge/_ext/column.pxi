"""One column of a record under way: how many rows of what length, and where its values come from.

pack.pxi writes the values, plan.pxi places them.
"""

cdef uint64_t MOST_VALUES = <uint64_t>1 << 48  # of a column: times the bytes of one, within 64 bits

# Whose values a learner trains with: each row's may carry a check.
CHECKED_COLUMNS = ("tokens", "loss_mask", "inference_logprobs", "ref_logprobs", "advantages")
# Whose values are log-probabilities of the row's own tokens, or the mark of none.
LOGPROBS = ("inference_logprobs", "ref_logprobs")
# By which shmbridge.put.convert.PutNotices may have something to say of a group.
WORTH_A_LOOK = ("temperature", "generation_params", "overrides", "group_overrides", "images")


class BeyondLayout(OverflowError):
    """More rows, values or bytes than the layout of a record can say."""


class WrongLengths(ValueError):
    """A column's lengths do not add up to its values, or are not as many as its rows."""


cdef enum Role:
    NO_ROLE
    IS_TOKENS                        # no value is negative
    SAYS_VERSIONS                    # token_versions: what of them is oldest is the record's
    ENDS_STEPS                       # step_ends: they rise, within the row's tokens, one for each step reward
    REWARDS_STEPS                    # step_rewards
    COUNTS_PROMPTS                   # prompt_length: within the row's tokens
    IS_MASK                          # loss_mask, masks: with COUNTS_PROMPTS, what says which tokens are trained
    IS_LOGPROBS                      # inference_logprobs, ref_logprobs: NaN where not recorded
    SAYS_MORE                        # of how it was sampled: something that learners may not train with


cdef class Form:
    """What packing needs to know of one column of a lane's table."""

    cdef readonly str name
    cdef readonly object dtype
    cdef readonly uint32_t number
    cdef readonly uint32_t item_bytes
    cdef readonly uint8_t kind
    cdef readonly bint per_token
    cdef readonly bint per_record
    cdef readonly bint finite
    cdef uint64_t check_seed         # of its rows' checks; 0: they have none
    cdef Role role
    cdef int code                    # dtype.char
    cdef int array_type              # NumPy's number of the dtype

    def __init__(self, str name not None, uint32_t number, int kind, dtype, *, bint per_token,
                 bint per_record, bint finite):
        self.name, self.number, self.kind, self.dtype = name, number, kind, dtype
        self.item_bytes, self.code = dtype.itemsize, ord(dtype.char)
        self.array_type = dtype.num
        self.per_token, self.per_record, self.finite = per_token, per_record, finite
        is_checked = name in CHECKED_COLUMNS and kind == KIND_LIST
        self.check_seed = row_check_seed(name.encode()) if is_checked else 0
        self.role = role_of(name, kind, dtype)


cdef Role role_of(str name, int kind, dtype):
    if kind == KIND_LIST and dtype == np.int32:
        if name == "tokens":
            return IS_TOKENS
        if name == "token_versions":
            return SAYS_VERSIONS
        if name == "step_ends":
            return ENDS_STEPS
    if name in LOGPROBS and kind == KIND_LIST and dtype == np.float32:
        return IS_LOGPROBS
    if name == "step_rewards" and kind == KIND_LIST:
        return REWARDS_STEPS
    if name == "prompt_length" and kind == KIND_SCALAR and dtype == np.int32:
        return COUNTS_PROMPTS
    if name in ("loss_mask", "masks"):
        return IS_MASK
    return SAYS_MORE if name in WORTH_A_LOOK else NO_ROLE


@cython.no_gc  # no user of a plan gets hold of its columns while it is made, and none keeps them
@cython.freelist(64)
cdef class PackedColumn:
    """A present column of a record. One record, one thread.

    Raises WrongLengths for what does not fit together, BeyondLayout. What C builds itself, of rows that it has
    counted, does not come through here.
    """

    cdef readonly Form form
    cdef readonly uint8_t tag
    cdef readonly uint32_t entries
    cdef readonly uint64_t count     # values
    # list of lists and arrays; one array of all values; bytes; or None: filled in by the caller
    cdef readonly object rows
    cdef object given                # the lengths beside one array, as they were handed over
    cdef readonly PackedColumn folds       # the record's tokens: `rows` are Atropos masks to fold with them
    cdef bytes row_lengths           # uint32[entries], or None
    cdef bytes inner_lengths         # uint32[], or None
    cdef bytes keys
    cdef bytes validity              # uint8[entries], or None
    cdef uint64_t values_at          # in lines; the plan's
    cdef uint64_t lengths_at
    cdef uint64_t inner_at
    cdef uint64_t keys_at
    cdef uint64_t validity_at
    cdef uint64_t checks_at

    def __init__(self, Form form not None, *, int tag=TAG_VALUES, entries=0, count=0,
                 lengths=None, inner=None, bytes keys=None, validity=None, rows=None):
        if not 0 <= entries <= 0xFFFFFFFF:
            raise BeyondLayout(f"{entries} rows, allowed are 0 to 2**32 - 1")
        self.form, self.tag, self.entries, self.count = form, tag, entries, count
        self.row_lengths = None if lengths is None else lengths.tobytes()
        self.inner_lengths = None if inner is None else inner.tobytes()
        self.validity = None if validity is None else validity.tobytes()
        self.keys, self.rows = keys, rows
        check_lengths(self)

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def lengths(self):
        """Values per row, uint32[entries], or None for a column that has one each."""
        return None if self.row_lengths is None else np.frombuffer(self.row_lengths, np.uint32)

    @property
    def inner(self):
        """Values per inner list, or bytes per key; uint32, or None."""
        return None if self.inner_lengths is None else np.frombuffer(self.inner_lengths, np.uint32)

    @property
    def valid(self):
        """bool[entries], or None where no row is null."""
        return None if self.validity is None else np.frombuffer(self.validity, np.bool_)


cdef int check_lengths(PackedColumn column) except -1:
    """Raises WrongLengths unless there is a length for each row, and they make the values that there are."""
    cdef uint64_t values = column.entries, inner
    if column.tag != TAG_VALUES:
        if (column.entries or column.count or column.row_lengths or column.inner_lengths or column.keys
                or column.validity):
            raise WrongLengths("it has values, and is said to have none")
        return 0
    if column.form.kind != KIND_SCALAR:
        values = summed(column.row_lengths, values, "rows")
    elif column.row_lengths is not None:
        raise WrongLengths("it has lengths, and one value a row")
    if column.form.kind == KIND_LIST_LIST or column.form.kind == KIND_MAP:
        inner = summed(column.inner_lengths, values, "lists or keys inside of them")
        if column.form.kind == KIND_LIST_LIST:
            values = inner
        elif column.keys is None or <uint64_t>PyBytes_GET_SIZE(column.keys) != inner:
            raise WrongLengths(f"its keys have {inner} bytes by their lengths")
    if values != column.count or values > MOST_VALUES:
        raise WrongLengths(f"its lengths make {values} values, and it has {column.count}")
    if column.validity is not None and PyBytes_GET_SIZE(column.validity) != column.entries:
        raise WrongLengths(f"{PyBytes_GET_SIZE(column.validity)} marks of null for {column.entries} rows")
    if column.form.kind == KIND_BYTES and (
            type(column.rows) is not bytes or <uint64_t>PyBytes_GET_SIZE(column.rows) != values):
        raise WrongLengths(f"its text has not the {values} bytes that its lengths make")
    return 0


cdef uint64_t summed(bytes lengths, uint64_t count, str what) except? 0:
    """The sum of so many uint32 lengths. It overflows at 2**32 of them, and a record has room for 2**30."""
    if lengths is None or PyBytes_GET_SIZE(lengths) % 4 or <uint64_t>PyBytes_GET_SIZE(lengths) // 4 != count:
        size = "no" if lengths is None else PyBytes_GET_SIZE(lengths) // 4
        raise WrongLengths(f"{size} lengths for {count} {what}")
    return index_sum(<const uint32_t*>PyBytes_AS_STRING(lengths), count)
