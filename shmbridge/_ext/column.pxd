from libc.stdint cimport uint8_t, uint32_t, uint64_t


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


cdef class PackedColumn:
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
