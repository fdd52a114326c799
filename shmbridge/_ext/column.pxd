from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef class Form:
    cdef readonly str name
    cdef readonly object dtype
    cdef readonly uint32_t number
    cdef readonly uint32_t item_bytes
    cdef readonly uint8_t kind
    cdef readonly bint per_token
    cdef readonly bint per_record
    cdef readonly bint finite
    cdef bint says_versions          # token_versions: what of them is oldest is the record's
    cdef uint64_t check_seed         # of its rows' checks; 0: they have none
    cdef bint is_tokens              # no value is negative
    cdef bint ends_steps             # step_ends: they rise, within the row's tokens, one for each step reward
    cdef bint rewards_steps          # step_rewards
    cdef bint counts_prompts         # prompt_length: within the row's tokens
    cdef int code                    # dtype.char
    cdef int array_type              # NumPy's number of the dtype


cdef class PackedColumn:
    cdef readonly Form form
    cdef readonly uint8_t tag
    cdef readonly uint32_t entries
    cdef readonly uint64_t count     # values
    cdef readonly object rows        # list of lists and arrays, bytes, or None: filled in by the caller
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
