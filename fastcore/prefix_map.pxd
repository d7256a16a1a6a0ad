# Hash of a full block -> id of the block that holds its KV.
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t

from aioengine.fastcore.block_hash cimport Hash
from aioengine.fastcore.block_pool cimport BlockPool
from aioengine.fastcore.kv_journal cimport KVJournal
from aioengine.fastcore.prefix_tree cimport PrefixTree
from aioengine.fastcore.twins cimport Twins


cdef enum:
    NEAR = 8     # steps ahead that are enough for a read to arrive
    FAR = 16     # and for one that tells where to read next
    SOON = 4     # and for one between long computations
    AHEAD = 32   # victims that are listed before the first of them is cut out
    LOOKED_UP = 64  # blocks of a path that are looked up before they are tried for consecutive ids again


cdef class PrefixMap:
    cdef BlockPool pool
    cdef readonly PrefixTree tree
    cdef readonly Twins twins         # None: a cache of one group
    cdef KVJournal journal            # None: nobody wants to know
    cdef int32_t* heads               # first block of each bucket; 0 = empty: the null block is never indexed
    cdef int32_t* behind              # the block behind a block in its bucket; 0 = none
    cdef uint32_t num_heads
    cdef uint64_t* hashes             # num_blocks x hash_words; the first word is 0 while a block is not in the map
    cdef int32_t hash_words
    cdef readonly int32_t num_entries

    cdef int32_t find(self, const uint64_t* hash) noexcept
    cdef int32_t find_path(
        self, const uint64_t* hashes, int32_t count, int32_t* found, int32_t num_guessed=?
    ) noexcept
    cdef int32_t confirm(self, const uint64_t* hashes, int32_t count, const int32_t* found) noexcept
    cdef int32_t find_each(self, const uint64_t* hashes, int32_t start, int32_t end, int32_t* found) noexcept
    cdef int32_t follow(self, const uint64_t* hashes, int32_t start, int32_t end, int32_t* found) noexcept
    cdef bint is_at(self, int32_t block_id, const uint64_t* hash) noexcept
    cdef int insert(self, int32_t block_id, const uint64_t* hash, int32_t parent, uint32_t lane) except -1
    cdef int expect(self, const uint64_t* hashes, const int32_t* ids, int32_t count) noexcept
    cdef int32_t insert_path(
        self, const uint64_t* hashes, const int32_t* ids, int32_t count, int32_t parent, uint16_t step
    ) except -1
    cdef int32_t take(self, int32_t count, int32_t* taken) except -1
    cdef int32_t take_in_order(self, int32_t count, int32_t* taken) except -1
    cdef int32_t approach(self, int32_t at, int32_t most, int32_t* ids, int32_t** buckets) noexcept
    cdef int32_t remove(self, int32_t block_id) except -1
    cdef int erase(self, int32_t block_id) except -1
    cdef int expect_run(self, int32_t at, int32_t step, int32_t count) noexcept
    cdef int32_t* end_of(self, int32_t* link, const uint64_t* hash) noexcept
    cdef bint has_hash(self, int32_t block_id, const uint64_t* hash) noexcept
    cdef bytes bytes_of(self, int32_t block_id)
    cdef Hash hash_of(self, int32_t block_id) noexcept
    cdef uint64_t* row(self, int32_t block_id) noexcept
    cdef int32_t* head_of(self, int32_t block_id) noexcept
