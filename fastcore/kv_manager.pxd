# Blocks of requests: prefix hits, allocation, publication, release.
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t

from aioengine.fastcore.block_hash cimport BlockHasher
from aioengine.fastcore.block_pool cimport BlockPool
from aioengine.fastcore.block_tokens cimport BlockTokens
from aioengine.fastcore.group_tables cimport GroupTables
from aioengine.fastcore.groups cimport KVGroups
from aioengine.fastcore.prefix_map cimport PrefixMap
from aioengine.fastcore.remote_kv cimport RemoteKV
from aioengine.fastcore.request cimport Request


cdef class KVManager:
    cdef readonly BlockPool pool
    cdef readonly PrefixMap prefix_map
    cdef readonly int32_t block_size
    cdef readonly KVGroups groups
    cdef readonly GroupTables more            # tables of the groups behind the first; None: there is one
    cdef readonly BlockHasher hasher          # None: prefix caching is off
    cdef readonly BlockTokens block_tokens    # None: partial-block reuse is off
    cdef int64_t[::1] tail_hashes             # of cached first blocks' salts and keys; None: their tokens tell them
    cdef readonly RemoteKV remote             # None: there is no connector
    cdef readonly dict pin_counts             # block -> pins that own it (cache_control)
    cdef readonly list barred                 # NamedPrefix whose span is never cached (cache_control)
    cdef readonly int64_t num_evicted_blocks  # that lost their prefix to new content, or with such a parent
    cdef int64_t step                         # the step being made, or that was made last
    cdef int64_t settled_step                 # the newest one that is over
    cdef bint hides_fresh                     # the step being made may still lose what was scheduled in it

    cdef bint shares_prompts(self, Request request) noexcept
    cdef bint reads_cache(self, Request request) noexcept
    cpdef int32_t match(self, Request request) except -1
    cdef int32_t match_cached(self, Request request) except -1
    cdef int32_t before_fresh(self, Request request, int32_t num_hits) noexcept
    cdef int match_tail(self, Request request, int32_t num_hits) except -1
    cdef int32_t before_barred(self, Request request, int32_t most) except -1
    cdef bint continues(self, int32_t block_id, Request request, int32_t at, bytes tail) except -1
    cdef int32_t match_sibling(self, Request request, int32_t num_hits) except -1
    cdef bint asks_remote(self, Request request) noexcept
    cdef int match_remote(self, Request request, int32_t num_hits) except -1
    cdef int forget_tail(self, Request request, int32_t num_hits) except -1
    cdef int32_t blocks_for(self, int32_t num_tokens) noexcept
    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int32_t num_tokens) noexcept
    cdef int64_t num_left(self, Request request) noexcept
    cdef int64_t num_freed(self, Request owner, Request other, int32_t num_hits) noexcept
    cpdef bint admit(self, Request request, int32_t num_hits, int32_t num_tokens) except -1
    cpdef int end_copy(self, Request request) except -1
    cpdef bint extend(self, Request request, int32_t num_tokens, int32_t num_computed=*) except -1
    cpdef int publish(self, Request request, int32_t num_computed) except -1
    cdef int publish_ahead(self, Request request) except -1
    cdef int publish_as_of(self, Request request, int32_t num_computed, int64_t step) except -1
    cdef int hash_ahead(self, Request request, int32_t end) except -1
    cdef int take_back(self, Request request) except -1
    cdef bint is_fresh(self, int32_t block_id) noexcept
    cdef bint is_being_written(self, Request source, int32_t at) noexcept
    cdef bint is_settled(self, int32_t block_id) noexcept
    cpdef int release(self, Request request) except -1
    cdef int forget_from(self, Request request, int32_t first) except -1
    cdef list take_stores(self)
    cdef bint is_barred(self, Request request, int32_t at) except *
    cdef int note_indexed(self, Request request, int32_t start, int32_t end) except -1
    cdef int offer(self, Request request, int32_t at) except -1
    cpdef int hold_back(self, Request request, int32_t until) except -1
    cdef int take_blocks(self, Request request, int32_t num_tokens) except -1
    cpdef list first_blocks(self, bytes first_tail)
    cdef bint is_under(self, int32_t block_id, bytes first_tail) except -1
    cdef int keep_tail(self, Request request) except -1
    cdef int ensure_hashes(self, Request request, int32_t count) except -1
