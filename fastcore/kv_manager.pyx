"""Gives blocks to requests and takes them back; decides what is shared through the prefix map.

Owns the pool, the map and the rules between them. The scheduler asks; nobody else does. The ledger of one
request, left to right:

    | hit in the prefix map | computed before | new in this step | (free slots of the last block)
    | <---- match --------> |                 |                  |
    | <-- shared, full ---> | <--- owned by this request alone: admit / extend --------------->
    | <------- num_published: full, computed, offered ------> |      publish, publish_ahead

`num_matched` and all counts of blocks here are those of the first group; the tables of the others are `more`'s.

Either a call gets all blocks of all groups that it needs or it takes none (A13). Table entries never change
while the request has them (A11), but for those that fall out of a window and become null. Only blocks with one
owner are ever written (INV-25), but for those that others hit in the step that fills them: a hit covers full
blocks only, and a full block is never written again. What is known of a block that is not full goes into a block of
the request's own, as a copy made by the device at the start of the step (A10). The source is
held until that step is packed, so that it is nobody's new block in the same step (INV-18).

A block is offered as soon as a step is made that fills it with known tokens: the device runs steps in order,
and in every layer of a step the keys and values of all rows are written before any row reads. So a block that
is read in step N was written by a step <= N. A copy is made before anything of its step is written: its source
is a sibling's, computed by an earlier step, or cached and computed by one that is over. No row of that has
failed, whose numbers would spread unseen; siblings fail together.
"""
import cython

from libc.string cimport memcpy

from aioengine.fastcore.block_hash cimport CHECKED, Hash
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, PREWARMED, Block
from aioengine.fastcore.group_tables cimport NO_STEP
from aioengine.fastcore.kv_journal cimport KVJournal
from aioengine.fastcore.named_prefix cimport NamedPrefix
from aioengine.fastcore.prefix_map cimport NEAR
from aioengine.fastcore.prefix_tree cimport ROOT, lane_of
from aioengine.fastcore.remote_kv cimport ASKED_AT_ONCE, is_loaded
from aioengine.fastcore.request cimport NO_LIMIT, GroupTable, reserve_table

cdef enum:
    HASHED_AHEAD = 64       # blocks of a prompt that are hashed before it is known that the first one is cached
    MOST_CANDIDATES = 64    # cached blocks that are compared token by token with a request's next block


@cython.final
cdef class KVManager:
    def __cinit__(
        self, int32_t num_blocks, int32_t block_size, bint enable_prefix_caching=True,
        str hash_algo="xxh3_128", root_seed=None, str eviction_policy="lru", double context_cost=0.0,
        bint enable_partial_block_reuse=False, kv_groups=(("full", 0, 1),), int32_t max_step_tokens=NO_LIMIT,
        kv_connector=None,
    ):
        if eviction_policy not in ("lru", "cost"):
            raise ValueError(f"eviction_policy={eviction_policy!r} must be lru or cost")
        self.groups = KVGroups(kv_groups, block_size, max_step_tokens)
        if enable_partial_block_reuse and self.groups.count > 1:
            raise ValueError(
                f"enable_partial_block_reuse needs one KV group, not {self.groups.count}: with more, hits are "
                "whole blocks of every group"
            )
        if kv_connector is not None and (self.groups.count > 1 or not enable_prefix_caching):
            raise ValueError(
                f"kv_connector needs prefix caching and one KV group, not {self.groups.count}: it knows blocks by "
                "their prefix hash, and there is one block of each"
                if enable_prefix_caching else "kv_connector needs prefix caching: it knows blocks by their prefix hash"
            )
        hasher = BlockHasher(hash_algo, root_seed)
        self.pool = BlockPool(num_blocks)
        self.prefix_map = PrefixMap(self.pool, hasher.digest_size)
        self.block_size = block_size
        if self.groups.count > 1:
            self.more = GroupTables(self.groups, self.pool, self.prefix_map)
        self.pin_counts, self.barred = {}, []
        if eviction_policy == "cost":
            self.prefix_map.rank_by_cost(block_size, context_cost)
        self.hasher = hasher if enable_prefix_caching else None
        if kv_connector is not None:
            self.remote = RemoteKV(kv_connector, hasher)
        self.tail_hashes = None  # without this it would be neither None nor anything
        if enable_prefix_caching and enable_partial_block_reuse:
            self.block_tokens = BlockTokens(num_blocks, block_size)
        elif enable_prefix_caching:
            self.tail_hashes = no_tail_hashes(num_blocks)

    cdef bint shares_prompts(self, Request request) noexcept:
        """Whether siblings of a request find what one of them computed: in its tables, or in the prefix map."""
        return self.more is None or self.reads_cache(request)

    cdef bint reads_cache(self, Request request) noexcept:
        # Prompt logits exist only for positions that are computed.
        return self.hasher is not None and not request.skip_prefix_cache and not request.wants_prompt_logits

    cpdef int32_t match(self, Request request) except -1:
        """Finds the longest computed prefix of a request without blocks; returns its number of full blocks.

        Writes the ids to the start of the table, the number of tokens to `num_matched`, and to `copy_source` a
        block to copy if they end inside of one, or to `num_loads` how many blocks more can be loaded. Takes nothing:
        only `admit` makes all that the request's.
        """
        request.num_loads = 0
        cdef int32_t hits = self.match_cached(request) if self.reads_cache(request) else 0
        if self.more is not None:
            hits = self.more.match(request, hits, self.step if self.hides_fresh else NO_STEP)
        self.forget_tail(request, hits)
        if self.block_tokens is not None and self.reads_cache(request):
            self.match_tail(request, hits)
        if request.siblings is not None and self.more is None:
            hits = self.match_sibling(request, hits)
        if self.remote is not None and self.asks_remote(request):
            self.match_remote(request, hits)
        return hits

    cdef int32_t match_cached(self, Request request) except -1:
        # At least one token is left to compute, or there would be no logits (INV-16).
        cdef int32_t most = (request.num_tokens - 1) // self.block_size
        cdef int32_t hits = 0
        cdef int32_t known
        request.reserve_blocks(most)
        while hits < most:
            # Most requests miss early: those behind the first gap are hashed when they are published.
            known = min(most, max(request.num_hashes, hits + HASHED_AHEAD))
            self.ensure_hashes(request, known)
            hits += self.prefix_map.find_path(
                request.hash_of(hits), known - hits, &request.blocks[hits], min(known, request.num_found) - hits
            )
            if hits < known:
                break
        request.num_found = hits
        return self.before_fresh(request, hits) if self.hides_fresh else hits

    cdef int32_t before_fresh(self, Request request, int32_t num_hits) noexcept:
        """So many of the first hits of a match are not computed by the step being made."""
        cdef int32_t i
        for i in range(num_hits):
            if self.is_fresh(request.blocks[i]):
                return i
        return num_hits

    cdef int match_tail(self, Request request, int32_t num_hits) except -1:
        """Finds a cached block behind the hits that begins like the request's next one, to be copied (A10).

        The one that shares most of `MOST_CANDIDATES`, the newest first: a popular prefix may have any number of
        continuations, and this is asked again in each step that the request waits.
        """
        cdef int32_t parent = ROOT if num_hits == 0 else request.blocks[num_hits - 1]
        cdef int32_t start = num_hits * self.block_size
        cdef const int32_t* tokens = request.tokens + start
        cdef int32_t end = min(start + self.block_size, request.num_tokens - 1)  # INV-16
        cdef int32_t most = (self.before_barred(request, end) if self.barred else end) - start
        cdef int32_t best = 0
        cdef int32_t candidates = 0
        cdef int32_t at = self.prefix_map.tree.newest(parent, lane_of(request.tails.first, request.tokens[0]))
        cdef bytes tail = request.tails.at(num_hits, self.block_size)
        cdef int32_t common
        while at != ROOT and candidates < MOST_CANDIDATES and best < most:
            common = self.block_tokens.num_common(at, tokens, most) if self.is_settled(at) else 0
            if common > best and self.continues(at, request, num_hits, tail):
                best = common
                request.copy_source = at
            at = self.prefix_map.tree.nodes[at].next
            candidates += 1
        request.num_matched = start + best
        return 0

    cdef bint continues(self, int32_t block_id, Request request, int32_t at, bytes tail) except -1:
        """Whether a cached block would be the request's block `at` if its tokens were the request's.

        Its hash proves what tokens cannot: that it follows the same blocks under the same salt and keys, and holds
        the same media at the same places. One that has a picture only behind the common tokens is not told from one
        that has another among them, and is not used.
        """
        cdef Hash expected
        self.hasher.hash_block(
            &self.hasher.root.word[0] if at == 0 else request.hash_of(at - 1),
            self.block_tokens.of(block_id), self.block_size, tail, expected.word,
        )
        return self.prefix_map.has_hash(block_id, expected.word)

    cdef int32_t match_sibling(self, Request request, int32_t num_hits) except -1:
        """Adds what a sibling has of the prompt to the hits; returns how many full blocks there are then.

        A sibling shares what it has computed, published or not: the prompts are one and the same. It does not
        share what was evicted by name meanwhile (INV-70).
        """
        cdef Request source = request.siblings.source()
        cdef int32_t shared = min(request.num_prompt_tokens, request.num_tokens - 1)
        cdef int32_t full = shared // self.block_size
        if source is not None and source.publish_until <= full:
            full = source.publish_until
            shared = full * self.block_size
        if source is not None and shared % self.block_size and self.is_being_written(source, full):
            shared = full * self.block_size
        if source is None or shared <= request.num_matched:
            return num_hits
        if full > num_hits or shared % self.block_size:
            # Also where the hits reach as far: who has a copy of a sibling's block has all that it was computed on, or
            # `readers_of` would not find it.
            request.reserve_blocks(full)
            memcpy(request.blocks, source.blocks, full * sizeof(int32_t))
        request.copy_source = source.blocks[full] if shared % self.block_size else NULL_BLOCK
        request.num_matched = shared
        return full

    cdef bint asks_remote(self, Request request) noexcept:
        return self.reads_cache(request) and not request.loads_nothing

    cdef int match_remote(self, Request request, int32_t num_hits) except -1:
        """Adds blocks that can be loaded to a match, if they reach further than it does (B15, INV-20).

        They do if there is a whole one behind the hits: a tail is less than a block. It is dropped then, for a block
        is either loaded or begun with a copy. What is barred is not loaded, nor anything behind it (INV-70).
        """
        cdef int32_t end = (request.num_tokens - 1) // self.block_size  # INV-16
        cdef int32_t known = num_hits
        cdef NamedPrefix name
        for name in self.barred:
            if name.span_block < end and name.is_in(request):
                end = name.span_block
        if request.asked_in != self.remote.num_calls or request.asked_from != num_hits:
            request.num_remote = num_hits
            while request.num_remote == known and known < end:
                known = min(end, known + ASKED_AT_ONCE)
                self.ensure_hashes(request, known)
                request.num_remote += self.remote.num_matched(request, request.num_remote, known)
            request.asked_in, request.asked_from = self.remote.num_calls, num_hits
        request.num_loads = request.num_remote - num_hits
        if request.num_loads:
            self.forget_tail(request, num_hits)
        return 0

    cdef int forget_tail(self, Request request, int32_t num_hits) except -1:
        """Leaves a request with the full blocks of its match, those to be loaded included."""
        request.copy_source = NULL_BLOCK
        request.num_matched = (num_hits + request.num_loads) * self.block_size
        return 0

    cdef int32_t blocks_for(self, int32_t num_tokens) noexcept:
        return (num_tokens + self.block_size - 1) // self.block_size

    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int32_t num_tokens) noexcept:
        """Free blocks missing to `admit` a request with what was just matched; <= 0 if it fits."""
        cdef int64_t free_hits = 0
        cdef int32_t i
        # Free blocks that are hits cannot serve as new ones too (INV-18).
        for i in range(num_hits):
            free_hits += self.pool.blocks[request.blocks[i]].num_refs == 0
        if request.copy_source != NULL_BLOCK:
            free_hits += self.pool.blocks[request.copy_source].num_refs == 0
        if self.more is not None:
            free_hits += self.more.num_lacking(request, num_hits, num_tokens)
        return <int64_t> self.blocks_for(num_tokens) - num_hits + free_hits - self.pool.num_free

    cdef int64_t num_left(self, Request request) noexcept:
        """Blocks that a running request still needs for the tokens known, at most."""
        cdef int64_t count = max(0, self.blocks_for(request.num_tokens) - request.num_blocks)
        return count if self.more is None else count + self.more.num_left(request, request.num_tokens)

    cdef int64_t num_freed(self, Request owner, Request other, int32_t num_hits) noexcept:
        """Blocks that `other`, with the hits just matched, could take as new ones if `owner` gave all back."""
        cdef int64_t count = 0
        cdef int32_t i
        for i in range(owner.num_blocks):
            # A hit that both have stands at the same index of both tables: it is of the same prefix.
            if self.pool.blocks[owner.blocks[i]].num_refs == 1 and (
                i >= num_hits or owner.blocks[i] != other.blocks[i]
            ):
                count += 1
        return count if self.more is None else count + self.more.num_freed(owner, other, num_hits)

    cpdef bint admit(self, Request request, int32_t num_hits, int32_t num_tokens) except -1:
        """Takes what was just matched and new blocks up to `num_tokens` positions; False changes nothing."""
        cdef int32_t i
        if CHECKED:
            assert request.num_blocks == 0 and num_hits <= self.blocks_for(num_tokens), f"{request!r} is not new"
            assert request.copy_source == NULL_BLOCK or num_hits < self.blocks_for(num_tokens), repr(request)
        if self.num_lacking(request, num_hits, num_tokens) > 0:
            return False
        # Before any new block is taken, or a hit could be the next victim (INV-18). To prewarm is no hit: what was
        # prewarmed stays the first to go, and a hit counts for nothing. What others cached is merely held meanwhile;
        # under LRU it is the newest when it is released, as after any owner.
        self.pool.acquire_all(request.blocks, num_hits, not request.prewarms)
        if request.copy_source != NULL_BLOCK:
            self.pool.acquire_all(&request.copy_source, 1, not request.prewarms)
        if num_hits and self.pool.order is not None and not request.prewarms:
            self.pool.order.hit_path(
                request.blocks, num_hits, num_hits >= (request.num_tokens - 1) // self.block_size
            )
        request.num_blocks = num_hits
        if self.more is not None:
            self.more.take_hits(request, num_hits)
        request.num_proven = min(request.num_proven, request.num_matched)
        # What a sibling computes now may not be indexed yet; whoever settles its step first will offer it.
        i = request.num_published
        while i < num_hits and self.pool.blocks[request.blocks[i]].flags & HASHED:
            i += 1
        request.num_published = i
        self.take_blocks(request, num_tokens)
        if request.copy_source != NULL_BLOCK:
            request.copy_target = request.blocks[num_hits]
        if request.num_loads:
            request.load_start = num_hits
            self.remote.load(request, self.step)
        return True

    cpdef int end_copy(self, Request request) except -1:
        """Lets go of the source of a request's copy, once the step is packed or the copy is off."""
        if request.copy_target != NULL_BLOCK:
            self.pool.release(request.copy_source)
            request.copy_source = request.copy_target = NULL_BLOCK
        return 0

    cpdef bint extend(self, Request request, int32_t num_tokens, int32_t num_computed=0) except -1:
        """Takes new blocks until the tables cover `num_tokens` positions; False takes none.

        What the query at `num_computed`, the next one, and later ones do not read is given back first.
        """
        cdef int64_t missing = self.blocks_for(num_tokens) - request.num_blocks
        if missing <= 0:  # no other group has finer blocks
            return True
        if self.more is not None:
            request.reserve_groups(self.groups.count - 1)
            self.more.drop(request, num_computed)
            missing += self.more.num_missing(request, num_tokens)
        if missing > self.pool.num_free:
            return False
        self.take_blocks(request, num_tokens)
        return True

    cdef int take_blocks(self, Request request, int32_t num_tokens) except -1:
        """Covers so many positions in every group; the blocks are there."""
        cdef int32_t wanted = self.blocks_for(num_tokens)
        cdef GroupTable* table
        cdef int32_t g
        if wanted > request.num_blocks:
            request.reserve_blocks(wanted)
            self.num_evicted_blocks += self.prefix_map.take(
                wanted - request.num_blocks, request.blocks + request.num_blocks
            )
            request.num_blocks = wanted
        for g in range(1, self.groups.count):
            table, wanted = &request.more[g - 1], self.groups.blocks_for(g, num_tokens)
            if wanted > table.num_blocks:
                reserve_table(table, wanted)
                self.num_evicted_blocks += self.prefix_map.take(
                    wanted - table.num_blocks, table.blocks + table.num_blocks
                )
                table.num_blocks = wanted
        return 0

    cpdef int publish(self, Request request, int32_t num_computed) except -1:
        """Offers the blocks that are full with `num_computed` positions to the prefix map: their step is over.

        A block whose hash the map knows stays an unhashed duplicate of its request (A11).
        """
        return self.publish_as_of(request, num_computed, self.settled_step)

    cdef int publish_ahead(self, Request request) except -1:
        """Offers the blocks that a request, all of whose tokens are known, fills in the step being made."""
        cdef int32_t reached = request.num_computed_tokens + request.step_tokens
        if CHECKED:
            assert reached <= request.num_tokens, f"{request!r} fills blocks with tokens that nobody knows"
        return self.publish_as_of(request, reached, self.step)

    cdef int publish_as_of(self, Request request, int32_t num_computed, int64_t step) except -1:
        cdef int32_t full = num_computed // self.block_size
        full = min(full, request.publish_until)
        if self.hasher is None or full <= request.num_published:
            return 0
        self.hash_ahead(request, full)
        cdef Block* blocks = self.pool.blocks
        cdef const int32_t* ids = request.blocks
        cdef int32_t i = request.num_published
        cdef int32_t num_indexed
        while i < full:
            if blocks[ids[i]].flags & HASHED:  # its other owner was first
                i += 1
                continue
            num_indexed = 0
            if i > 0 and blocks[ids[i - 1]].flags & HASHED and not self.barred:
                num_indexed = self.prefix_map.insert_path(
                    request.hash_of(i), ids + i, full - i, ids[i - 1], <uint16_t> step
                )
                self.note_indexed(request, i, i + num_indexed)
                i += num_indexed
            if num_indexed == 0:
                blocks[ids[i]].step = <uint16_t> step
                self.offer(request, i)
                i += 1
        request.num_published = full
        if self.more is not None:
            self.more.publish(request, full * self.block_size, step)
        return 0

    cdef int hash_ahead(self, Request request, int32_t end) except -1:
        """Hashes the blocks that are to be offered, and asks for what that will read while the next ones are hashed."""
        cdef int32_t first, until
        request.reserve_hashes(end, self.hasher.words)
        for first in range(request.num_published, end, NEAR):
            until = min(end, first + NEAR)
            self.ensure_hashes(request, until)
            self.prefix_map.expect(request.hash_of(first), request.blocks + first, until - first)
        return 0

    cdef int take_back(self, Request request) except -1:
        """Forgets what a request was to compute in the step being made: it never will.

        With it goes what others offered behind it; they do so again when they give their blocks back.
        """
        cdef int32_t first = request.num_computed_tokens // self.block_size
        cdef int32_t i
        for i in range(first, request.num_published):
            if self.pool.blocks[request.blocks[i]].flags & HASHED:
                self.prefix_map.remove(request.blocks[i])
        request.num_published = min(request.num_published, first)
        return 0 if self.more is None else self.more.take_back(request)

    cdef bint is_fresh(self, int32_t block_id) noexcept:
        """Whether the step being made computes an indexed block."""
        return self.pool.blocks[block_id].step == <uint16_t> self.step

    cdef bint is_being_written(self, Request source, int32_t at) noexcept:
        """Whether the step being made writes a block of a request that has its prompt.

        Copies are made before the step's tokens are computed: it would be copied as it was. A request that came back
        in this step may have hit what another one computes in it, or may wait for a copy itself. What is loaded may
        be lost, and nobody would know that it was copied: it must be there for certain.
        """
        cdef int32_t block_id = source.blocks[at]
        if source.copy_target == block_id:
            return True
        if self.remote is not None and is_loaded(source, at) and source.load_step > self.settled_step:
            return True
        if not self.pool.blocks[block_id].flags & HASHED:
            return False
        return self.is_fresh(block_id) if self.remote is None else not self.is_settled(block_id)

    cdef bint is_settled(self, int32_t block_id) noexcept:
        """Whether the step that computed an indexed block is over.

        Only the low bits of a step are kept. A block of some multiple of 65536 steps ago may be taken for a new
        one, and then is not copied: nothing worse.
        """
        cdef uint16_t behind = <uint16_t> (self.pool.blocks[block_id].step - self.settled_step - 1)
        return behind >= self.step - self.settled_step

    cpdef int hold_back(self, Request request, int32_t until) except -1:
        """Keeps a request from offering its blocks from `until` on, and what follows them."""
        request.publish_until = min(request.publish_until, until)
        request.num_published = min(request.num_published, until)
        return 0 if self.more is None else self.more.hold_back(request, until)

    cdef int offer(self, Request request, int32_t at) except -1:
        """Indexes a full block of a request if its parent is indexed and its hash is not."""
        cdef int32_t parent = ROOT
        cdef uint32_t lane = 0
        if self.barred and self.is_barred(request, at):
            return 0
        if at == 0:
            lane = lane_of(request.tails.first, request.tokens[0])
        else:
            parent = request.blocks[at - 1]
            if not self.pool.blocks[parent].flags & HASHED:  # a duplicate: its twin is the parent
                parent = self.prefix_map.find(request.hash_of(at - 1))
                if parent == NULL_BLOCK:
                    return 0
        if not self.prefix_map.insert(request.blocks[at], request.hash_of(at), parent, lane):
            return 0
        if at == 0:
            self.keep_tail(request)
        self.note_indexed(request, at, at + 1)
        return 1

    cdef int note_indexed(self, Request request, int32_t start, int32_t end) except -1:
        """Keeps and tells what is to be known of blocks that were just indexed."""
        cdef int32_t i
        for i in range(start, end):
            if self.block_tokens is not None:
                self.block_tokens.keep(request.blocks[i], request.tokens + <Py_ssize_t> i * self.block_size)
            if self.remote is not None and not is_loaded(request, i):
                self.remote.indexed[self.hasher.as_bytes(request.hash_of(i))] = request.blocks[i]
            if request.prewarms:
                self.pool.blocks[request.blocks[i]].flags |= PREWARMED
            if self.prefix_map.journal is not None:
                self.prefix_map.journal.stored(
                    self.hasher.as_bytes(request.hash_of(i)),
                    self.hasher.as_bytes(request.hash_of(i - 1)) if i > 0 else None,
                    request.tokens + <Py_ssize_t> i * self.block_size, self.block_size,
                    request.tails.at(i, self.block_size),
                )
        return 0

    cdef bint is_barred(self, Request request, int32_t at) except *:
        """Whether a quarantined span begins in a block; what follows it has no parent then (INV-70)."""
        cdef NamedPrefix name
        for name in self.barred:
            if at == name.span_block and name.is_in(request):
                return True
        return False

    cdef int32_t before_barred(self, Request request, int32_t most) except -1:
        """So many of the first `most` tokens of a request come before any quarantined span."""
        cdef NamedPrefix name
        for name in self.barred:
            if name.start < most and name.begins_in(request):
                most = name.start
        return most

    cpdef list first_blocks(self, bytes first_tail):
        """The cached first blocks of all prefixes under a salt and keys, whatever media they hold."""
        cdef list found = []
        cdef int32_t i
        for i in range(1, self.pool.num_blocks):
            if self.prefix_map.tree.nodes[i].parent == ROOT and self.is_under(i, first_tail):
                found.append(i)
        return found

    cdef int keep_tail(self, Request request) except -1:
        """Remembers the salt and keys of a first block that was just indexed, in 64 bits.

        Where tokens are kept its hash tells them, unless media have entered it: most pools hold none, and then
        need no memory for that.
        """
        if self.tail_hashes is None:
            if request.tails.at(0, self.block_size) is request.tails.first:
                return 0
            self.tail_hashes = no_tail_hashes(self.pool.num_blocks)
        self.tail_hashes[request.blocks[0]] = hash(request.tails.first)
        return 0

    cdef bint is_under(self, int32_t block_id, bytes first_tail) except -1:
        """Whether a cached first block is under a salt and keys."""
        cdef Hash own
        if self.tail_hashes is not None and self.tail_hashes[block_id] == <int64_t> hash(first_tail):
            return True
        if self.block_tokens is None:
            return False
        self.hasher.hash_block(
            self.hasher.root.word, self.block_tokens.of(block_id), self.block_size, first_tail, own.word
        )
        return self.prefix_map.has_hash(block_id, own.word)

    cpdef int release(self, Request request) except -1:
        """Gives all blocks back, deepest first, so that shared roots are evicted last (INV-23)."""
        cdef int32_t end = request.num_blocks
        cdef int32_t last_duplicate = -1
        cdef int32_t i, twin
        cdef Block* block
        self.end_copy(request)
        # Duplicates take their twins' places, if those were evicted meanwhile, and all below them come back.
        for i in range(request.num_published):
            block = &self.pool.blocks[request.blocks[i]]
            if not block.flags & HASHED and (block.num_refs > 1 or not self.offer(request, i)):
                last_duplicate = i
        if self.more is not None:
            self.more.offer_again(request)
            self.more.release(request)
        for i in range(last_duplicate, -1, -1):
            if not self.pool.blocks[request.blocks[i]].flags & HASHED:
                self.pool.release_all(&request.blocks[i], end - i)
                end = i
                # The use of a duplicate is a use of its twin, or the twin would go before its children.
                twin = self.prefix_map.find(request.hash_of(i))
                if twin != NULL_BLOCK and not request.prewarms and self.pool.blocks[twin].num_refs == 0:
                    self.pool.touch(twin)
        self.pool.release_all(request.blocks, end)
        if CHECKED:
            for i in range(request.num_blocks):
                request.blocks[i] = -0x55555556
        request.num_blocks = request.num_published = request.num_found = request.num_loads = 0
        request.publish_until = NO_LIMIT
        return 0

    cdef int forget_from(self, Request request, int32_t first) except -1:
        """Takes what a request has from a block on out of the cache: it is not what its hash says."""
        cdef int32_t i
        for i in range(first, request.num_blocks):
            if self.pool.blocks[request.blocks[i]].flags & HASHED:
                self.prefix_map.remove(request.blocks[i])
        return self.hold_back(request, first)

    cdef list take_stores(self):
        """(hash, block id) of what was computed and indexed since the last call, if it is over and still there."""
        cdef dict unsettled = {}
        cdef list stores = []
        cdef int32_t block_id
        if self.remote is None:
            return stores
        for digest, block in self.remote.indexed.items():
            block_id = block
            if not self.pool.blocks[block_id].flags & HASHED or self.prefix_map.bytes_of(block_id) != digest:
                continue
            if self.is_settled(block_id):
                stores.append((digest, block))
            else:
                unsettled[digest] = block
        self.remote.indexed = unsettled
        return stores

    cdef int ensure_hashes(self, Request request, int32_t count) except -1:
        """Hashes full blocks one after the other, each from its parent (B3, INV-12)."""
        request.reserve_hashes(count, self.hasher.words)
        if request.num_hashes < count:
            self.hasher.hash_path(
                request.tokens, self.block_size, request.tails, request.hashes, request.num_hashes, count
            )
            request.num_hashes = count
        return 0

    @property
    def bytes_per_block(self):
        """Memory that a block takes here: record, hash, slots of the map, links of the tree, token ids."""
        num_bytes = self.pool.num_bytes + self.prefix_map.num_bytes
        if self.tail_hashes is not None:
            num_bytes += self.tail_hashes.nbytes
        if self.block_tokens is not None:
            num_bytes += self.block_tokens.num_bytes
        if self.pool.order is not None:
            num_bytes += self.pool.order.num_bytes
        return num_bytes / self.pool.num_blocks

    def start_journal(self):
        """From now on the journal returned tells what is indexed and forgotten."""
        self.prefix_map.journal = KVJournal()
        return self.prefix_map.journal

    def reset(self):
        """Forgets all cached prefixes; False, and nothing changes, while any block has an owner."""
        if self.pool.num_free != self.pool.num_blocks - 1:
            return False
        self.prefix_map.clear()
        return True

    def forget(self, owners):
        """Forgets all cached prefixes, and that those who own blocks have something to offer."""
        cdef Request request
        self.prefix_map.clear()
        for request in owners:
            self.hold_back(request, 0)

    def hashes_of(self, Request request not None):
        """The block hashes computed so far for a request."""
        cdef int32_t i
        return [self.hasher.as_bytes(request.hash_of(i)) for i in range(request.num_hashes)]

    def check(self, owners):
        """Pool and map agree with each other and with the requests that own blocks (INV-21)."""
        cdef dict counts = {}
        cdef Request request
        cdef int32_t i
        self.pool.check()
        self.prefix_map.check()
        for request in owners:
            assert request.load_start + request.num_loads <= request.num_blocks or not request.num_loads, repr(request)
            if self.more is not None:
                self.more.check(request, counts)
            assert request.num_published <= request.num_blocks, repr(request)
            assert request.copy_target == NULL_BLOCK, f"{request!r} still holds block {request.copy_source}"
            for i in range(request.num_blocks):
                assert 0 < request.blocks[i] < self.pool.num_blocks, f"{request!r}: block {request.blocks[i]}"
                counts[request.blocks[i]] = counts.get(request.blocks[i], 0) + 1
                if i < request.num_published or (i + 1) * self.block_size <= request.num_computed_tokens:
                    continue
                if request.is_fenced:
                    continue  # it may have been preempted, and then counts nothing as computed
                # A block that may still be written belongs to one request alone (INV-12, INV-25).
                assert self.pool.blocks[request.blocks[i]].num_refs == 1, f"{request!r} shares open block {i}"
                assert not self.pool.blocks[request.blocks[i]].flags & HASHED, (
                    f"{request!r}: block {i} is indexed before it is computed"
                )
        for i in range(1, self.pool.num_blocks):
            num_owners = counts.get(i, 0) + self.pin_counts.get(i, 0)
            assert self.pool.blocks[i].num_refs == num_owners, (
                f"block {i} counts {self.pool.blocks[i].num_refs} owners, {num_owners} own it"
            )


cdef int64_t[::1] no_tail_hashes(int32_t num_blocks):
    return memoryview(bytearray(num_blocks * sizeof(int64_t))).cast("q")
