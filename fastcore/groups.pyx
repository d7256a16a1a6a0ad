"""The groups of a KV cache: layers that read the same span of the past share one, with its own block table.

Owns the numbers of every group and the arithmetic over them; blocks and tables are `group_tables`' business.
All groups take their blocks from one pool. The first one keeps everything: prefixes are found, evicted and
pinned by its blocks, and what the others cache hangs on those (`twins`). For that a block must outlive all that
continues it, which a window breaks; so layers that all have a window are one full group, whose kernels read less.

    kind      a query at position p reads       its block: scale x block_size tokens
    full      0 .. p
    sliding   p - size + 1 .. p                 | out: read by no query any more | in view | this step |
    chunked   p // size * size .. p             0                    num_out blocks    num_computed   target
"""
import cython

from math import lcm

from aioengine.fastcore.request cimport NO_LIMIT

cdef dict KINDS = {"full": FULL, "sliding": SLIDING, "chunked": CHUNKED}


@cython.final
cdef class KVGroups:
    def __cinit__(self, kv_groups not None, int32_t block_size, int32_t max_step_tokens=NO_LIMIT):
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        if not 1 <= len(kv_groups) <= MOST_GROUPS:
            raise ValueError(f"kv_groups has {len(kv_groups)} groups; it may have 1 to {MOST_GROUPS}")
        self.block_size = block_size
        for entry in kv_groups:
            if not isinstance(entry, tuple) or len(entry) != 3 or entry[0] not in KINDS:
                raise ValueError(
                    f"kv_groups holds {entry!r}; a group is (full, sliding or chunked; size; scale)"
                )
            kind, size, scale = entry
            self.add(kind, size, scale, max_step_tokens)
        scale = lcm(*(self.groups[i].scale for i in range(self.count)))
        if scale > MOST_ALIGNMENT:
            raise ValueError(f"kv_groups: the common multiple {scale} of all scales is above {MOST_ALIGNMENT}")
        self.alignment = scale * block_size

    cdef int add(self, str kind, int64_t size, int64_t scale, int64_t max_step_tokens) except -1:
        cdef Group* group = &self.groups[self.count]
        if (size != 0) if kind == "full" else not 1 <= size < NO_LIMIT:
            raise ValueError(f"kv_groups: size={size} of {kind!r} must be 0 for full, else 1 to {NO_LIMIT - 1}")
        if not 1 <= scale <= MOST_ALIGNMENT:
            raise ValueError(f"kv_groups: scale={scale} must lie between 1 and {MOST_ALIGNMENT}")
        if self.count == 0 and (kind != "full" or scale != 1):
            raise ValueError(
                f"kv_groups begins with ({kind!r}, {size}, {scale}) and must begin with ('full', 0, 1): "
                "prefixes are found by a group that keeps every block"
            )
        group.kind, group.size, group.scale = <Kind> <int> KINDS[kind], <int32_t> size, <int32_t> scale
        group.block_size = <int32_t> min(scale * self.block_size, <int64_t> NO_LIMIT)
        group.most_held = NO_LIMIT
        if group.kind != FULL:  # in view of the first query of a step, and the step's own tokens
            group.most_held = <int32_t> min(
                (size - 1 + max_step_tokens + group.block_size - 1) // group.block_size + 1, <int64_t> NO_LIMIT
            )
        self.count += 1
        return 0

    cdef int32_t num_out(self, int32_t group, int32_t num_computed) noexcept:
        """Leading blocks that the query at position `num_computed` and all later ones do not read."""
        cdef Group* g = &self.groups[group]
        if g.kind == SLIDING:
            return (num_computed - g.size + 1) // g.block_size if num_computed >= g.size else 0
        if g.kind == CHUNKED:
            return num_computed // g.size * g.size // g.block_size
        return 0

    cdef int32_t last_fine(self, int32_t group, int32_t at) noexcept:
        """The first group's block that ends where a group's block `at` does; its hash is that block's (INV-15)."""
        return (at + 1) * self.groups[group].scale - 1

    cdef int32_t blocks_for(self, int32_t group, int64_t num_tokens) noexcept:
        """Entries of a group's table that cover so many tokens."""
        return <int32_t> ((num_tokens + self.groups[group].block_size - 1) // self.groups[group].block_size)

    cdef int64_t entries_for(self, int64_t num_tokens) noexcept:
        """Entries of all tables that cover so many tokens."""
        cdef int64_t count = 0
        cdef int32_t g
        for g in range(self.count):
            count += self.blocks_for(g, num_tokens)
        return count

    cdef int64_t most_blocks(self, int64_t num_tokens) noexcept:
        """Blocks of all groups that are enough for a request on its way to so many tokens."""
        cdef int64_t count = 0
        cdef int32_t g
        for g in range(self.count):
            count += min(self.blocks_for(g, num_tokens), self.groups[g].most_held)
        return count

    def capacity(self, int64_t num_blocks):
        """Tokens of the longest request for which so many blocks are enough for certain."""
        cdef int64_t low = 0
        cdef int64_t high = min(num_blocks * self.block_size, <int64_t> NO_LIMIT)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
