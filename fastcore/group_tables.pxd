# The block tables of the groups behind the first one.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.block_pool cimport BlockPool
from aioengine.fastcore.groups cimport KVGroups
from aioengine.fastcore.prefix_map cimport PrefixMap
from aioengine.fastcore.request cimport GroupTable, Request
from aioengine.fastcore.twins cimport Twins


cdef enum:
    NO_STEP = -1    # what every step computes may be found


cdef class GroupTables:
    cdef readonly KVGroups groups
    cdef BlockPool pool
    cdef PrefixMap prefix_map
    cdef Twins twins

    cdef int32_t longest(self, const int32_t* primaries, int32_t num_hits, int64_t hidden_step) noexcept
    cdef bint sees(self, int32_t primary, int32_t group, int64_t hidden_step) noexcept
    cdef int32_t aligned(self, int32_t num_tokens) noexcept
    cdef int32_t match(self, Request request, int32_t num_hits, int64_t hidden_step) except -1
    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int64_t num_tokens) noexcept
    cdef int64_t num_freed(self, Request owner, Request other, int32_t num_hits) noexcept
    cdef int64_t num_left(self, Request request, int64_t num_tokens) noexcept
    cdef int take_hits(self, Request request, int32_t num_hits) except -1
    cdef int drop(self, Request request, int32_t num_computed) except -1
    cdef int64_t num_missing(self, Request request, int32_t num_tokens) noexcept
    cdef int publish(self, Request request, int32_t num_computed, int64_t step) except -1
    cdef int take_back(self, Request request) except -1
    cdef int offer(self, Request request, int32_t group, int32_t at) except -1
    cdef int hold_back(self, Request request, int32_t until) except -1
    cdef int offer_again(self, Request request) except -1
    cdef int release(self, Request request) except -1
    cdef list cut(self, list primaries)
