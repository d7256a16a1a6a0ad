# What an operator does to the prefix cache by name: evict, quarantine, pin, reset.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from aioengine.fastcore.block_facts cimport BlockFacts
from aioengine.fastcore.block_hash cimport Hash
from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.named_prefix cimport NamedPrefix
from aioengine.fastcore.request cimport Request
from aioengine.fastcore.scheduler cimport Scheduler


cdef class CacheControl:
    cdef Scheduler scheduler
    cdef KVManager kv
    cdef readonly dict pins        # id -> blocks, the first one first, those of other groups at the end
    cdef int num_pins_made
    cdef readonly object connector  # where blocks are kept beside the pool; None: nowhere

    cdef int32_t walk(self, NamedPrefix name, int32_t most, list found) except -1
    cdef list hit_of(self, NamedPrefix name, list twins)
    cdef list roots_of_span(self, NamedPrefix name, bint* is_exact)
    cdef bint is_child(self, NamedPrefix name, int32_t parent, int32_t block_id, bytes tail) except *
    cdef bint may_be_child(self, NamedPrefix name, int32_t parent, int32_t block_id, bytes tail) except *
    cdef list kept_roots_of_span(self, NamedPrefix name, bint* is_exact)
    cdef int holds_span(self, NamedPrefix name, const uint64_t* parent, BlockFacts facts, bytes tail) except -1
    cdef list below(self, int32_t block_id)
    cdef list settled(self, list blocks)
    cdef int break_pins(self, set gone) except -1
    cdef int keep_back(self, NamedPrefix name) except -1
