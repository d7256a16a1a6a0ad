"""What tells a cached block apart wherever its KV is kept: its hash, its parent's, its tokens, its salt.

Made of a block of the pool while that is in the prefix map, and kept by whoever keeps the block's KV elsewhere
(`aioengine/kv_host_tier`), so that a prefix named by an operator is found there too: `cache_control` compares.
Immutable.
"""
import cython

from aioengine.fastcore.block_hash cimport Hash
from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.prefix_tree cimport ROOT, UNCACHED


@cython.final
cdef class BlockFacts:
    def __cinit__(self, bytes block_hash not None, bytes parent_hash=None, *, bytes tokens=None, tail_hash=None):
        self.block_hash, self.parent_hash, self.tokens = block_hash, parent_hash, tokens
        self.has_tail_hash = tail_hash is not None
        self.tail_hash = tail_hash or 0

    def __repr__(self):
        return f"BlockFacts({self.block_hash.hex()[:8]} behind {self.parent_hash.hex()[:8] if self.parent_hash else None})"

    cdef const int32_t* token_ids(self) noexcept:
        return NULL if self.tokens is None else <const int32_t*> <const char*> self.tokens

    cdef bint has_tail(self, BlockHasher hasher, const uint64_t* parent, bytes tail) except -1:
        """Whether just this follows its tokens in its hash; they must be kept."""
        cdef Hash expected
        hasher.hash_block(parent, self.token_ids(), <int32_t> (len(self.tokens) // sizeof(int32_t)), tail, expected.word)
        return hasher.as_bytes(expected.word) == self.block_hash

    cdef bint is_under(self, BlockHasher hasher, bytes first_tail) except -1:
        """Whether a first block is under a salt and keys, whatever media it holds."""
        if self.has_tail_hash and self.tail_hash == <int64_t> hash(first_tail):
            return True
        return self.tokens is not None and self.has_tail(hasher, hasher.root.word, first_tail)


cdef int32_t parent_of(KVManager kv, int32_t block_id) except UNCACHED:
    """The cached block before a cached one, or ROOT."""
    cdef int32_t parent = UNCACHED
    if 0 < block_id < kv.pool.num_blocks:
        parent = kv.prefix_map.tree.nodes[block_id].parent
    if parent == UNCACHED:
        raise ValueError(f"block {block_id} is not in the prefix map")
    return parent


def facts_of(KVManager kv not None, int32_t block_id):
    """The facts of a block of the pool that is in the prefix map; ValueError if it is not."""
    cdef int32_t parent = parent_of(kv, block_id)
    cdef bytes tokens = None
    if kv.block_tokens is not None:
        tokens = (<const char*> kv.block_tokens.of(block_id))[: kv.block_size * sizeof(int32_t)]
    tail_hash = kv.tail_hashes[block_id] if parent == ROOT and kv.tail_hashes is not None else None
    before = None if parent == ROOT else kv.prefix_map.bytes_of(parent)
    return BlockFacts(kv.prefix_map.bytes_of(block_id), before, tokens=tokens, tail_hash=tail_hash)


def lineage(KVManager kv not None, int32_t block_id, has):
    """A cached block and those before it, the first one first, back to the first whose hash `has` says is known.

    As (facts, block id). Empty while a step that computes or loads one of them is in flight: what is cached ahead of
    it may be taken back. ValueError if the block is not in the prefix map.
    """
    cdef list found = []
    parent_of(kv, block_id)
    while block_id != ROOT and not has(kv.prefix_map.bytes_of(block_id)):
        if not kv.is_settled(block_id):
            return []
        found.append((facts_of(kv, block_id), block_id))
        block_id = parent_of(kv, block_id)
    found.reverse()
    return found
