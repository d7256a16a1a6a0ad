# Hash of a full block -> id of the block that holds its KV.
from libc.stdint cimport int32_t, uint32_t, uint64_t

from aioengine.fastcore.block_hash cimport BlockHasher, Hash
from aioengine.fastcore.block_pool cimport BlockPool
from aioengine.fastcore.kv_journal cimport KVJournal
from aioengine.fastcore.prefix_tree cimport PrefixTree
from aioengine.fastcore.twins cimport Twins


cdef class PrefixMap:
    cdef BlockPool pool
    cdef readonly PrefixTree tree
    cdef readonly Twins twins         # None: a cache of one group
    cdef KVJournal journal            # None: nobody wants to know
    cdef int32_t* heads               # first block of each bucket; 0 = empty: the null block is never indexed
    cdef int32_t* behind              # the block behind a block in its bucket; 0 = none
    cdef uint32_t num_heads
    cdef uint64_t* hashes             # num_blocks x hash_words, valid for flagged blocks
    cdef int32_t hash_words
    cdef readonly int32_t num_entries

    cdef int32_t find(self, const Hash* hash) noexcept
    cdef int32_t find_path(self, const Hash* hashes, int32_t count, int32_t* found) noexcept
    cdef int expect(self, const Hash* hash) noexcept
    cdef int insert(self, int32_t block_id, const Hash* hash, int32_t parent, uint32_t lane) except -1
    cdef int32_t take(self, int32_t count, int32_t* taken) except -1
    cdef int32_t remove(self, int32_t block_id) except -1
    cdef int erase(self, int32_t block_id) except -1
    cdef bint has_hash(self, int32_t block_id, const Hash* hash) noexcept
    cdef bytes bytes_of(self, int32_t block_id)
    cdef Hash hash_of(self, int32_t block_id) noexcept
    cdef uint64_t* row(self, int32_t block_id) noexcept
    cdef int32_t* head_of(self, int32_t block_id) noexcept
    cdef int32_t scout(self, int32_t at) noexcept
    cdef int32_t scout_home(self, int32_t at) noexcept
