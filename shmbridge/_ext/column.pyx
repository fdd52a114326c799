"""One column of a record under way: how many rows of what length, and where its values come from.

pack.pyx writes the values, plan.pyx places them.
"""

cimport cython
cimport numpy as cnp

import numpy as np

from shmbridge._ext.layout cimport KIND_LIST, KIND_SCALAR, TAG_VALUES

cdef extern from "row_check.h" nogil:
    uint64_t row_check_seed(const char* column)

cnp.import_array()

# Whose values a learner trains with: each row's may carry a check.
CHECKED_COLUMNS = ("tokens", "loss_mask", "inference_logprobs", "ref_logprobs", "advantages")
# By which shmbridge.put.untrainable_notices may have something to say of a group.
WORTH_A_LOOK = ("temperature", "generation_params", "overrides", "group_overrides", "images")


class BeyondLayout(OverflowError):
    """More rows, values or bytes than the layout of a record can say."""


cdef class Form:
    """What packing needs to know of one column of a lane's table."""

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
    """A present column of a record. One record, one thread."""

    def __init__(self, Form form not None, *, int tag=TAG_VALUES, entries=0, count=0,
                 lengths=None, inner=None, bytes keys=None, validity=None, rows=None):
        if entries > 0xFFFFFFFF:
            raise BeyondLayout(f"{entries} rows, allowed are 2**32 - 1")
        self.form, self.tag, self.entries, self.count = form, tag, entries, count
        self.row_lengths = None if lengths is None else lengths.tobytes()
        self.inner_lengths = None if inner is None else inner.tobytes()
        self.validity = None if validity is None else validity.tobytes()
        self.keys, self.rows = keys, rows

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
