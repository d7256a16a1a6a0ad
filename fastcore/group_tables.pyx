"""The block tables of the groups behind the first one: hits, windows, publication, release.

`kv_manager` does for the first group what is done here for the others, and calls this in each of its operations;
with one group this object does not exist. A table has an entry for each block of the whole context:

    | null: out of every query's sight | in view: hits, computed before | new in this step |
    0                              num_out                    num_computed           num_blocks

Blocks fall out when a step is scheduled, before new ones are taken: those that the step's first query does not
read. The device runs steps in order, so steps in flight have read such a block before a later step writes it,
and within a step nobody reads it; a scheduled position never comes again, but with all blocks given back.
A prefix is hit only where every group has what the queries behind it read; hits are whole blocks of every
group, and nothing is copied: where prompts part inside a block, all of it is computed again.
"""
from array import array

import cython

from libc.stdint cimport uint16_t

from aioengine.fastcore.block_hash cimport CHECKED
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, Block
from aioengine.fastcore.groups cimport MOST_GROUPS
from aioengine.fastcore.request cimport reserve_table


@cython.final
cdef class GroupTables:
    def __cinit__(self, KVGroups groups not None, BlockPool pool not None, PrefixMap prefix_map not None):
        self.groups, self.pool, self.prefix_map = groups, pool, prefix_map
        self.twins = prefix_map.twins = Twins(pool, groups.count - 1)

    # ---- looking ----

    cdef int32_t longest(self, const int32_t* primaries, int32_t num_hits, int64_t hidden_step) noexcept:
        """Of so many cached blocks of the first group, how many are a hit of all groups.

        What `hidden_step`, the one being made, is to compute does not count.

        Each group looks from the end of the prefix back over what is in view there. A gap cuts the prefix, and
        all groups look again; `found` has the first block of a run that a group has seen, so none looks twice.
        """
        cdef int32_t found[MOST_GROUPS]
        cdef int32_t length = self.aligned(num_hits * self.groups.block_size)
        cdef int32_t g, at, first
        for g in range(1, self.groups.count):
            found[g] = length // self.groups.groups[g].block_size
        g = 1
        while g < self.groups.count:
            first = self.groups.num_out(g, length)
            at = min(found[g], length // self.groups.groups[g].block_size)
            while at > first and self.sees(primaries[self.groups.last_fine(g, at - 1)], g, hidden_step):
                at -= 1
            found[g] = at
            g += 1
            if at > first:
                length = self.aligned((at - 1) * self.groups.groups[g - 1].block_size)
                g = 1
        return length // self.groups.block_size

    cdef bint sees(self, int32_t primary, int32_t group, int64_t hidden_step) noexcept:
        cdef int32_t block_id = self.twins.of(primary, group)
        return block_id != NULL_BLOCK and (
            hidden_step == NO_STEP or self.pool.blocks[block_id].step != <uint16_t> hidden_step
        )

    cdef int32_t aligned(self, int32_t num_tokens) noexcept:
        return num_tokens // self.groups.alignment * self.groups.alignment

    cdef int32_t match(self, Request request, int32_t num_hits, int64_t hidden_step) except -1:
        """Cuts a hit of the first group to one of all groups, and writes their ids to the tables."""
        cdef int32_t g, i, scale
        cdef GroupTable* table
        num_hits = self.longest(request.blocks, num_hits, hidden_step)
        request.reserve_groups(self.groups.count - 1)
        for g in range(1, self.groups.count):
            scale, table = self.groups.groups[g].scale, &request.more[g - 1]
            reserve_table(table, num_hits // scale)
            for i in range(self.groups.num_out(g, num_hits * self.groups.block_size), num_hits // scale):
                table.blocks[i] = self.twins.of(request.blocks[self.groups.last_fine(g, i)], g)
        return num_hits

    cdef list cut(self, list primaries):
        """Cuts cached blocks of the first group to a hit of all groups; returns what that has in the others."""
        cdef list found = []
        cdef int32_t g, i, scale, num_hits
        if not primaries:
            return found
        cdef int32_t[::1] ids = array("i", primaries)
        num_hits = self.longest(&ids[0], <int32_t> len(primaries), NO_STEP)
        del primaries[num_hits:]
        for g in range(1, self.groups.count):
            scale = self.groups.groups[g].scale
            for i in range(self.groups.num_out(g, num_hits * self.groups.block_size), num_hits // scale):
                found.append(self.twins.of(ids[self.groups.last_fine(g, i)], g))
        return found

    # ---- counting ----

    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int64_t num_tokens) noexcept:
        """Blocks that a request needs beside its hits, and hits that are free and cannot serve as such.

        Free hits fall out of a window like new blocks: with them it never has more than the group's most.
        """
        cdef int64_t count = 0
        cdef int64_t needed
        cdef int32_t g, i, end
        for g in range(1, self.groups.count):
            end = num_hits // self.groups.groups[g].scale
            needed = self.groups.blocks_for(g, num_tokens) - end
            for i in range(self.groups.num_out(g, num_hits * self.groups.block_size), end):
                needed += self.pool.blocks[request.more[g - 1].blocks[i]].num_refs == 0
            count += min(needed, self.groups.groups[g].most_held)
        return count

    cdef int64_t num_freed(self, Request owner, Request other, int32_t num_hits) noexcept:
        """As `KVManager.num_freed`, of the other groups."""
        cdef int64_t count = 0
        cdef int32_t g, i, first, end
        cdef GroupTable* table
        for g in range(1, self.groups.count):
            table = &owner.more[g - 1]
            first = self.groups.num_out(g, num_hits * self.groups.block_size)
            end = num_hits // self.groups.groups[g].scale
            for i in range(table.num_out, table.num_blocks):
                if self.pool.blocks[table.blocks[i]].num_refs == 1 and (
                    not first <= i < end or table.blocks[i] != other.more[g - 1].blocks[i]
                ):
                    count += 1
        return count

    cdef int64_t num_left(self, Request request, int64_t num_tokens) noexcept:
        """Blocks that a running request takes at most, beside those it has, on its way to so many tokens."""
        cdef int64_t count = 0
        cdef int32_t g, missing
        for g in range(1, self.groups.count):
            # What falls out comes back only if nobody else has it, so what it has in view is not set off.
            missing = self.groups.blocks_for(g, num_tokens) - request.more[g - 1].num_blocks
            count += min(max(missing, 0), self.groups.groups[g].most_held)
        return count

    cdef int64_t num_missing(self, Request request, int32_t num_tokens) noexcept:
        """New blocks that cover so many positions."""
        cdef int64_t count = 0
        cdef int32_t g
        for g in range(1, self.groups.count):
            count += max(self.groups.blocks_for(g, num_tokens) - request.more[g - 1].num_blocks, 0)
        return count

    # ---- taking and giving back ----

    cdef int take_hits(self, Request request, int32_t num_hits) except -1:
        """Makes what was matched the request's own."""
        cdef int32_t g, i
        cdef GroupTable* table
        for g in range(1, self.groups.count):
            table = &request.more[g - 1]
            table.num_out = self.groups.num_out(g, num_hits * self.groups.block_size)
            table.num_blocks = table.num_published = num_hits // self.groups.groups[g].scale
            for i in range(table.num_out):
                table.blocks[i] = NULL_BLOCK
            for i in range(table.num_out, table.num_blocks):
                if request.prewarms:  # to prewarm is no hit
                    self.pool.acquire(table.blocks[i])
                else:
                    self.pool.hit(table.blocks[i])
                    if self.pool.order is not None:
                        self.pool.order.beside(table.blocks[i], self.twins.primary_of[table.blocks[i]])
        return 0

    cdef int drop(self, Request request, int32_t num_computed) except -1:
        """Gives back what the query at `num_computed`, the next to be scheduled, and later ones do not read."""
        cdef int32_t g, i, first
        cdef GroupTable* table
        for g in range(1, self.groups.count):
            table = &request.more[g - 1]
            first = min(self.groups.num_out(g, num_computed), table.num_blocks)
            for i in range(table.num_out, first):
                self.pool.release(table.blocks[i])
                table.blocks[i] = NULL_BLOCK
            table.num_out = max(table.num_out, first)
        return 0

    cdef int release(self, Request request) except -1:
        """Gives everything back, group after group, the deepest block first."""
        cdef int32_t g, i
        cdef GroupTable* table
        for g in range(request.num_more):
            table = &request.more[g]
            for i in range(table.num_blocks - 1, table.num_out - 1, -1):
                self.pool.release(table.blocks[i])
                if CHECKED:
                    table.blocks[i] = -0x55555556
            table.num_blocks = table.num_out = table.num_published = table.num_sent = 0
        return 0

    # ---- offering ----

    cdef int publish(self, Request request, int32_t num_computed, int64_t step) except -1:
        """Offers full blocks in view that `step` computes, after the first group's, whose hashes it needs."""
        cdef int32_t g, i, full
        cdef GroupTable* table
        for g in range(1, self.groups.count):
            table = &request.more[g - 1]
            full = num_computed // self.groups.groups[g].block_size
            for i in range(max(table.num_published, table.num_out), full):  # what fell out is skipped (B14)
                if not self.pool.blocks[table.blocks[i]].flags & HASHED:
                    self.pool.blocks[table.blocks[i]].step = <uint16_t> step
                    self.offer(request, g, i)
            table.num_published = max(table.num_published, full)
        return 0

    cdef int take_back(self, Request request) except -1:
        """Forgets what a request was to compute in the step being made; its own primaries are forgotten."""
        cdef int32_t g, i, first
        cdef GroupTable* table
        for g in range(1, self.groups.count):
            table = &request.more[g - 1]
            first = request.num_computed_tokens // self.groups.groups[g].block_size
            for i in range(max(first, table.num_out), table.num_published):
                if self.twins.has(table.blocks[i]):  # on the primary of another request
                    self.twins.leave(table.blocks[i])
            table.num_published = min(table.num_published, first)
        return 0

    cdef int offer(self, Request request, int32_t group, int32_t at) except -1:
        """Caches a full block if its hash is indexed and has no block in this group yet."""
        cdef int32_t fine = self.groups.last_fine(group, at)
        cdef int32_t primary = request.blocks[fine]
        if not self.pool.blocks[primary].flags & HASHED:  # a duplicate, or not to be cached
            primary = self.prefix_map.find(request.hash_of(fine))
        if primary == NULL_BLOCK or self.twins.of(primary, group) != NULL_BLOCK:
            return 0
        return self.twins.join(request.more[group - 1].blocks[at], primary, group, request.prewarms)

    cdef int hold_back(self, Request request, int32_t until) except -1:
        """Keeps blocks from being offered that end behind so many blocks of the first group."""
        cdef int32_t g
        for g in range(1, self.groups.count):
            request.more[g - 1].num_published = min(
                request.more[g - 1].num_published, until // self.groups.groups[g].scale
            )
        return 0

    cdef int offer_again(self, Request request) except -1:
        """Duplicates of cached blocks that were evicted meanwhile take their places."""
        cdef int32_t g, i
        cdef Block* block
        cdef GroupTable* table
        for g in range(1, request.num_more + 1):
            table = &request.more[g - 1]
            for i in range(table.num_out, table.num_published):
                block = &self.pool.blocks[table.blocks[i]]
                if block.num_refs == 1 and not block.flags & HASHED:
                    self.offer(request, g, i)
        return 0

    # ---- checking ----

    def check(self, Request request not None, dict counts not None):
        """A request's tables hold blocks for all positions in view, and null before; adds owners to `counts`."""
        cdef int32_t g, i
        cdef GroupTable* table
        cdef Block* block
        cdef Py_ssize_t end
        assert request.num_more in (0, self.groups.count - 1), repr(request)
        for g in range(request.num_more):
            table, block_size = &request.more[g], self.groups.groups[g + 1].block_size
            assert 0 <= table.num_out <= table.num_blocks, f"{request!r}: group {g + 1}"
            assert table.num_published <= table.num_blocks, f"{request!r}: group {g + 1}"
            end = table.num_blocks * block_size
            assert end >= request.num_computed_tokens or request.num_blocks == 0, f"{request!r}: group {g + 1}"
            for i in range(table.num_blocks):
                block_id = table.blocks[i]
                if i < table.num_out:
                    assert block_id == NULL_BLOCK, f"{request!r}: block {block_id} is out of the window"
                    continue
                assert 0 < block_id < self.pool.num_blocks, f"{request!r}: block {block_id} of group {g + 1}"
                counts[block_id] = counts.get(block_id, 0) + 1
                if i >= table.num_published and (i + 1) * block_size > request.num_computed_tokens:
                    block = &self.pool.blocks[<int32_t> block_id]
                    assert block.num_refs == 1, f"{request!r} shares the open block {i} of group {g + 1}"
                    assert not block.flags & HASHED, (
                        f"{request!r}: block {i} of group {g + 1} is cached before it is computed"
                    )
