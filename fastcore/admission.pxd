# The gates of admission: who may not start yet although a row and tokens are left.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.request cimport Request


cdef class Admission:
    cdef readonly KVManager kv
    # Limits; 0 = off.
    cdef readonly bint full_sequence_must_fit
    cdef readonly int32_t watermark_blocks
    cdef readonly int32_t max_partial
    cdef readonly int32_t max_long_partial
    cdef readonly int32_t long_tokens     # a prompt with more tokens to compute is long
    cdef bint needs_survey

    cdef dict promises                    # key -> blocks
    cdef readonly int64_t num_promised

    # Of the step being made.
    cdef bint any_running
    cdef int32_t num_partial              # running requests whose prompt this step does not finish,
    cdef int32_t num_long                 # and those of them that are long
    cdef int64_t num_reserved             # blocks that they still need

    cdef int survey(self, list running) except -1
    cdef int count(self, Request request) noexcept
    cdef int64_t reserved_for(self, Request request) noexcept
    cdef bint is_partial_blocked(self, int32_t num_left, int32_t num_new) noexcept
    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int32_t num_tokens) noexcept
