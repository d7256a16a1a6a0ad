# What a store outside the pool has of prefixes: asked, loaded from, given what is new.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.block_hash cimport BlockHasher
from aioengine.fastcore.request cimport Request
from aioengine.fastcore.step_buffer cimport StepPlan


cdef enum:
    ASKED_AT_ONCE = 64      # blocks that the connector is asked for in one call


cdef class RemoteKV:
    cdef readonly object connector
    cdef BlockHasher hasher
    cdef list loads                 # (hash, block id) of the step being made, in order of position per request
    cdef list loaders               # whose those are
    cdef dict indexed               # hash -> block id, offered to the prefix map since stores were taken last
    cdef int64_t num_calls          # of schedule()
    cdef readonly int64_t num_query_tokens
    cdef readonly int64_t num_hit_tokens
    cdef readonly int64_t num_lost_blocks

    cdef int32_t num_matched(self, Request request, int32_t start, int32_t end) except -1
    cdef int load(self, Request request, int64_t step) except -1
    cdef int count(self, Request request, int32_t num_local, int32_t num_loaded) noexcept
    cdef int end_step(self, StepPlan plan) except -1
    cdef int give_up(self, StepPlan plan, set lost) except -1


cdef inline bint is_loaded(Request request, int32_t at) noexcept:
    """Whether an entry of a request's table was loaded for it."""
    return request.load_start <= at < request.load_start + request.num_loads


cdef set lost_of(StepPlan plan, lost_blocks)
cdef dict readers_of(set lost, list owners)
