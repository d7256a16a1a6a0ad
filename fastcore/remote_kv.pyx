"""KV of full blocks that is kept outside the pool, behind a connector: a tier in host memory, another engine's cache.

Owns what the scheduler knows of it: the loads of the step being made, what was indexed since stores were taken last,
the counters, and the rule that says who has read a block that could not be loaded. `kv_manager` decides what is
loaded, `scheduler` what becomes of requests; the device does the loads of a step before its copies, and those before
anything is computed.

    num_matched          schedule                            update                      take_stores
    may be fetched  -->  in the plan, and offered to  -->    lost: nothing was read  --> new in the index,
                         others as if it was computed        that anybody is told        and computed here
"""
import cython


@cython.final
cdef class RemoteKV:
    def __cinit__(self, connector not None, BlockHasher hasher not None):
        if not callable(getattr(connector, "num_matched", None)):
            raise TypeError(f"kv_connector={connector!r} has no num_matched(block_hashes)")
        self.connector, self.hasher = connector, hasher
        self.loads, self.loaders, self.indexed = [], [], {}

    cdef int32_t num_matched(self, Request request, int32_t start, int32_t end) except -1:
        """How many blocks of a request from `start` on, whose hashes are known to `end`, can be fetched."""
        cdef int32_t i
        cdef list hashes = [self.hasher.as_bytes(request.hash_of(i)) for i in range(start, end)]
        count = self.connector.num_matched(hashes)
        if not isinstance(count, int) or not 0 <= count <= end - start:
            raise ValueError(f"kv_connector says that {count!r} of {end - start} blocks can be fetched")
        return count

    cdef int load(self, Request request, int64_t step) except -1:
        """Notes the loads of a request that has just got its blocks."""
        cdef int32_t i
        request.load_step = step
        for i in range(request.load_start, request.load_start + request.num_loads):
            self.loads.append((self.hasher.as_bytes(request.hash_of(i)), request.blocks[i]))
            self.loaders.append(request)
        return 0

    cdef int count(self, Request request, int32_t num_local, int32_t num_loaded) noexcept:
        """Counts a request that starts for the first time, in tokens."""
        self.num_query_tokens += request.num_tokens - num_local
        self.num_hit_tokens += num_loaded
        return 0

    cdef int end_step(self, StepPlan plan) except -1:
        """Hands the loads to the plan of their step."""
        if self.loads:
            plan.loads, plan.loaders = self.loads, self.loaders
            self.loads, self.loaders = [], []
        return 0

    cdef int give_up(self, StepPlan plan, set lost) except -1:
        """Keeps those whose loads failed from asking again, or they might never get on."""
        cdef Py_ssize_t i
        self.num_lost_blocks += len(lost)
        for i in range(len(plan.loads)):
            if plan.loads[i][1] in lost:
                (<Request> plan.loaders[i]).loads_nothing = True
        return 0


cdef set lost_of(StepPlan plan, lost_blocks):
    """The blocks that a step failed to load, if it was to load them."""
    cdef set lost = set(lost_blocks)
    cdef set others = lost.difference([block_id for _, block_id in plan.loads])
    if others:
        raise ValueError(f"{plan!r} did not load the blocks {sorted(others)}")
    return lost


cdef dict readers_of(set lost, list owners):
    """Who has read blocks that were not loaded, or what was computed on them: request -> first such table entry.

    `owners` are all who have blocks. A request has read its table from the beginning, so whatever follows a block
    that is no good is none either, in its own table and in those of others who hit it. Copies lead no further: their
    source is settled, or is a sibling's that shares all full blocks before it.
    """
    cdef set bad = set(lost)
    cdef dict found = {}
    cdef bint grows = True
    cdef Request request
    cdef int32_t end, first, i
    while grows:
        grows = False
        for request in owners:
            end = found.get(request, request.num_blocks)
            first = 0
            while first < end and request.blocks[first] not in bad:
                first += 1
            if first < end:
                bad.update([request.blocks[i] for i in range(first, end)])
                found[request] = first
                grows = True
    return found
