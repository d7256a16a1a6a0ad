"""Acts on cached prefixes by name, between steps: evict a span, bar it, pin it, forget everything.

Owns the pins. Everything else it does through the records that are there: what is evicted leaves the prefix map
with all that was computed after it; requests that run on such blocks go on, but neither they nor those blocks
are offered to the map again. What a connector keeps of such a prefix outside the pool goes with it. The engine's
`cache_admin` is the only caller and keeps the books.
"""
import cython

from libc.string cimport memcmp

from aioengine.fastcore.block_pool cimport NULL_BLOCK
from aioengine.fastcore.prefix_tree cimport ROOT, lane_of

cdef enum:
    HOLDS_NOT = 0
    HOLDS = 1
    MAY_HOLD = 2


@cython.final
cdef class CacheControl:
    def __cinit__(self, Scheduler scheduler not None, connector=None):
        self.scheduler, self.kv, self.connector = scheduler, scheduler.kv, connector
        self.pins = {}

    # ---- looking ----

    def cached_blocks(self, NamedPrefix name not None):
        """Full blocks of the named prefix that a request would hit: cached, up to the first gap."""
        return len(self.hit_of(name, []))

    def pinnable_blocks(self, NamedPrefix name not None):
        """Those of them that a pin would hold: with a connector up to the first whose step is in flight."""
        return len(self.settled(self.hit_of(name, [])))

    def loadable_blocks(self, NamedPrefix name not None):
        """Full blocks of the named prefix that a request could have loaded, behind those it would hit."""
        cdef list found = []
        cdef list hashes = []
        cdef Hash parent = self.kv.hasher.root
        cdef Hash current
        cdef int32_t i
        if self.connector is None:
            return 0
        self.walk(name, name.num_tokens // name.block_size, found)
        for i in range(name.num_tokens // name.block_size):
            name.hash_at(self.kv.hasher, i, parent.word, current.word)
            parent = current
            if i >= len(found):
                hashes.append(self.kv.hasher.as_bytes(current.word))
        return self.connector.num_matched(hashes) if hashes else 0

    def whole_blocks(self, NamedPrefix name not None):
        """As many as can be cached of a prefix: what fills whole blocks of every group."""
        return name.num_tokens // self.kv.groups.alignment * self.kv.groups.alignment // name.block_size

    cdef list hit_of(self, NamedPrefix name, list twins):
        """The cached blocks that a request for a prefix would hit; those of other groups go to `twins`."""
        cdef list found = []
        self.walk(name, name.num_tokens // name.block_size, found)
        if self.kv.more is not None:
            twins += self.kv.more.cut(found)
        return found

    cdef int32_t walk(self, NamedPrefix name, int32_t most, list found) except -1:
        """Collects cached blocks of a name from its beginning; returns the last one, or ROOT."""
        cdef Hash parent = self.kv.hasher.root
        cdef Hash current
        cdef int32_t block_id = ROOT
        cdef int32_t next_id, i
        for i in range(most):
            name.hash_at(self.kv.hasher, i, parent.word, current.word)
            next_id = self.kv.prefix_map.find(current.word)
            if next_id == NULL_BLOCK:
                break
            block_id, parent = next_id, current
            found.append(block_id)
        return block_id

    cdef list roots_of_span(self, NamedPrefix name, bint* is_exact):
        """The cached blocks in which the span begins. Inexact: among them may be others with the same parent.

        None if they cannot be told from those of other tenants.
        """
        cdef list found = []
        cdef list roots = []
        cdef bytes tail
        cdef int32_t parent, start
        cdef uint32_t lane
        is_exact[0] = True
        if name.num_tokens == 0:
            return self.kv.first_blocks(name.tails.first)
        if name.num_tokens >= (name.span_block + 1) * name.block_size:
            self.walk(name, name.span_block + 1, found)
            return found[name.span_block:]
        parent = self.walk(name, name.span_block, found)
        if len(found) < name.span_block:
            return []
        if self.kv.block_tokens is None:
            is_exact[0] = False
            return self.kv.prefix_map.tree.children_of(parent) if parent != ROOT else None
        lane = lane_of(name.tails.first, name.tokens[0])
        start = name.span_block * name.block_size
        tail = name.tails.at(name.span_block, name.block_size)
        for block_id in self.kv.prefix_map.tree.children_of(parent, lane):
            if self.kv.block_tokens.num_common(
                block_id, &name.tokens[start], name.num_tokens - start
            ) < name.num_tokens - start:
                continue
            if self.is_child(name, parent, block_id, tail):
                roots.append(block_id)
            elif self.may_be_child(name, parent, block_id, tail):
                roots.append(block_id)
                is_exact[0] = False
        return roots

    cdef bint is_child(self, NamedPrefix name, int32_t parent, int32_t block_id, bytes tail) except *:
        """Whether a block that begins like the rest of a name follows its last full one with just this tail."""
        cdef Hash before = self.kv.hasher.root if parent == ROOT else self.kv.prefix_map.hash_of(parent)
        cdef Hash expected
        self.kv.hasher.hash_block(
            before.word, self.kv.block_tokens.of(block_id), name.block_size, tail, expected.word
        )
        return self.kv.prefix_map.has_hash(block_id, expected.word)

    cdef bint may_be_child(self, NamedPrefix name, int32_t parent, int32_t block_id, bytes tail) except *:
        """Whether a block with another tail may still hold the span: it has media that the name does not tell of.

        They may begin behind the name, or stand for other pictures among its tokens: the hash does not say which.
        """
        cdef bytes without = name.tails.first if parent == ROOT else name.tails.later
        if parent == ROOT and not self.kv.is_under(block_id, without):
            return False  # another tenant's
        return tail == without or not self.is_child(name, parent, block_id, without)

    cdef list kept_roots_of_span(self, NamedPrefix name, bint* is_exact):
        """Hashes of the blocks in which the span begins, among those that the connector keeps; as `roots_of_span`.

        Of a name that fills the block the hash alone, whether it is there or not.
        """
        cdef list roots = []
        cdef Hash parent = self.kv.hasher.root
        cdef Hash current
        cdef BlockFacts facts
        cdef bytes before = None
        cdef bytes tail
        cdef int32_t i
        cdef int found
        is_exact[0] = True
        if name.num_tokens == 0:
            for facts in self.connector.children_of(None):
                if facts.is_under(self.kv.hasher, name.tails.first):
                    roots.append(facts.block_hash)
            return roots
        for i in range(min(name.span_block + 1, name.num_tokens // name.block_size)):
            name.hash_at(self.kv.hasher, i, parent.word, current.word)
            if i == name.span_block:
                return [self.kv.hasher.as_bytes(current.word)]
            parent = current
            before = self.kv.hasher.as_bytes(current.word)
        tail = name.tails.at(name.span_block, name.block_size)
        for facts in self.connector.children_of(before):
            found = self.holds_span(name, parent.word, facts, tail)
            if found:
                roots.append(facts.block_hash)
            if found == MAY_HOLD:
                is_exact[0] = False
        return roots

    cdef int holds_span(self, NamedPrefix name, const uint64_t* parent, BlockFacts facts, bytes tail) except -1:
        """Whether a kept block behind the last full one of a name holds what is left of it; see `may_be_child`."""
        cdef int32_t start = name.span_block * name.block_size
        cdef bytes without = name.tails.later if facts.parent_hash is not None else name.tails.first
        if facts.token_ids() == NULL:
            return MAY_HOLD
        if memcmp(facts.token_ids(), &name.tokens[start], (name.num_tokens - start) * sizeof(int32_t)) != 0:
            return HOLDS_NOT
        if facts.has_tail(self.kv.hasher, parent, tail):
            return HOLDS
        if facts.parent_hash is None and not facts.is_under(self.kv.hasher, without):
            return HOLDS_NOT  # another tenant's
        if tail != without and facts.has_tail(self.kv.hasher, parent, without):
            return HOLDS_NOT
        return MAY_HOLD

    cdef list below(self, int32_t block_id):
        """A cached block and all cached after it."""
        cdef list found = [block_id]
        for at in found:  # grows while it is walked
            found += self.kv.prefix_map.tree.children_of(at)
        return found

    # ---- evicting ----

    def evict(self, NamedPrefix name not None, *, bint require_exact=False):
        """Takes a span and all computed after it out of the cache.

        Returns (is_exact, blocks taken out, of those in use, requests that go on with them, pins broken), or
        None if it cannot be done, or not exactly and has to be; then nothing changes.
        """
        cdef bint is_exact
        cdef bint are_kept_exact = True
        cdef list roots = self.roots_of_span(name, &is_exact)
        cdef list kept = []
        cdef set gone = set()
        cdef int num_broken, num_requests
        cdef int in_use = 0
        if roots is not None and self.connector is not None:
            kept = self.kept_roots_of_span(name, &are_kept_exact)
            is_exact = is_exact and are_kept_exact
        if roots is None or (require_exact and not is_exact):
            return None
        for root in roots:
            gone.update(self.below(root))
        num_broken = self.break_pins(gone)
        for block_id in gone:
            in_use += self.kv.pool.blocks[<int32_t> block_id].num_refs > 0
        for root in roots:
            self.kv.prefix_map.remove(root)
        if kept:
            self.connector.forget(kept)
        num_requests = self.keep_back(name)
        return is_exact, len(gone), in_use, num_requests, num_broken

    cdef int keep_back(self, NamedPrefix name) except -1:
        """Keeps requests that hold the span from publishing it and what follows; returns their number."""
        cdef Request request
        cdef int count = 0
        for request in [*self.scheduler.running, *self.scheduler.in_flight.deferred]:
            if request.num_blocks > name.span_block and name.is_in(request):
                self.kv.hold_back(request, name.span_block)
                count += 1
        return count

    def take_back(self, Request request not None):
        """Evicts what a request has computed since its last good token: a row of it has failed.

        Called before that step is settled. Whoever hit it already computes on the same numbers and fails in turn,
        or keeps for itself what it computes; nobody else hits them any more. Returns the blocks taken out and the
        pins broken.
        """
        cdef int32_t first = request.num_proven // self.kv.block_size
        if self.kv.hasher is None:
            return 0, 0
        if first >= request.num_tokens // self.kv.block_size:
            # Nothing of it can be cached yet. But accepted drafts may fill the block in the step that has failed.
            if request.num_blocks > first:
                self.kv.hold_back(request, first)
            return 0, 0
        _, num_blocks, _, _, num_broken = self.evict(NamedPrefix.of_block(request, first, self.kv.block_size))
        return num_blocks, num_broken

    def bar(self, NamedPrefix name not None):
        """From now on the span is never cached; False if it is barred already."""
        if name in self.kv.barred:
            return False
        self.kv.barred.append(name)
        return True

    def lift(self, NamedPrefix name not None):
        """Ends what `bar` began; False if the span is not barred."""
        if name not in self.kv.barred:
            return False
        self.kv.barred.remove(name)
        return True

    @property
    def num_barred(self):
        """Spans that are barred."""
        return len(self.kv.barred)

    # ---- pinning ----

    @property
    def num_pinned_blocks(self):
        """Blocks with at least one pin."""
        return len(self.kv.pin_counts)

    @property
    def max_pinned_blocks(self):
        """So many may be pinned that a request of the greatest length still fits."""
        cdef int64_t longest = self.kv.groups.most_blocks(self.scheduler.limits.max_model_len + 1)
        return max(0, self.kv.pool.num_blocks - 1 - longest)

    def pin(self, NamedPrefix name not None):
        """Holds the cached full blocks of a prefix; returns (pin id, blocks), or None if none is cached.

        With more than one group it also holds what queries behind the prefix read in the others; the blocks
        returned are the first group's. With a connector only what is certain to be there is pinned. Raises ValueError
        if more would be pinned than may be.
        """
        cdef list twins = []
        cdef list found = self.hit_of(name, twins)
        found = self.settled(found)
        cdef Py_ssize_t num_blocks = len(found)
        if not found:
            return None
        found += twins
        new = sum(block_id not in self.kv.pin_counts for block_id in found)
        if len(self.kv.pin_counts) + new > self.max_pinned_blocks:
            raise ValueError(
                f"pinning {new} more blocks would leave too few for a request of the greatest length: "
                f"{len(self.kv.pin_counts)} are pinned, {self.max_pinned_blocks} may be"
            )
        for block_id in found:
            self.kv.pool.acquire(block_id)
            self.kv.pin_counts[block_id] = self.kv.pin_counts.get(block_id, 0) + 1
        self.num_pins_made += 1
        pin_id = f"pin-{self.num_pins_made}"
        self.pins[pin_id] = found
        return pin_id, num_blocks

    cdef list settled(self, list blocks):
        """The first of some cached blocks that no step in flight loads or computes; without a connector all of them."""
        cdef Py_ssize_t count = 0
        if self.kv.remote is None:
            return blocks
        while count < len(blocks) and self.kv.is_settled(blocks[count]):
            count += 1
        return blocks[:count]

    def unpin(self, str pin_id not None):
        """Lets the blocks of a pin go, deepest first; returns their number in all groups, 0 without such a pin."""
        cdef list blocks = self.pins.pop(pin_id, [])
        for block_id in reversed(blocks):
            if self.kv.pin_counts[block_id] == 1:
                del self.kv.pin_counts[block_id]
            else:
                self.kv.pin_counts[block_id] -= 1
            self.kv.pool.release(block_id)
        return len(blocks)

    cdef int break_pins(self, set gone) except -1:
        """Ends every pin that holds one of these blocks; returns how many."""
        cdef list broken = [pin_id for pin_id, blocks in self.pins.items() if not gone.isdisjoint(blocks)]
        for pin_id in broken:
            self.unpin(pin_id)
        return len(broken)

    # ---- forgetting ----

    def reset(self, *, bint force=False):
        """Forgets every cached prefix; returns the number of blocks forgotten, or None if any is in use.

        With `force` pins end and running requests are preempted: they compute everything again.
        """
        cdef int32_t num_cached = self.kv.prefix_map.num_entries
        if force:
            for pin_id in list(self.pins):
                self.unpin(pin_id)
        if not self.scheduler.reset_prefix_cache(force=force):
            return None
        if self.connector is not None:
            self.connector.clear()
        return num_cached

    def check(self):
        """Pins and the counts of pinned blocks agree."""
        counts = {}
        for blocks in self.pins.values():
            for block_id in blocks:
                counts[block_id] = counts.get(block_id, 0) + 1
        assert counts == self.kv.pin_counts, f"{counts} != {self.kv.pin_counts}"
