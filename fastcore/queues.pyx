"""The queue of waiting requests: binary heaps that know where each request sits.

Owns the order of admission: `Request.rank`, ties by arrival. Both are fixed when a request is added, so a
preempted one returns to the front of those that came after it, and holding a request back never reorders the
others (INV-34). The scheduler sets the rank, pushes, peeks and removes.

Long prompts sit in a heap of their own where only some of them may be prefilled at once: passing over all of
them is then one comparison, whatever their number, and changes nobody's order.

Why not a deque for FCFS: an abort has to leave from the middle, here in O(log n), and one structure serves
both policies.
"""
import cython

from aioengine.fastcore.request cimport Request


cdef bint before(Request a, Request b) noexcept:
    """Whether `a` is to be admitted before `b`, and to be preempted after it."""
    if a.rank != b.rank:
        return a.rank < b.rank
    return a.arrival < b.arrival


@cython.final
cdef class WaitQueue:
    def __cinit__(self, int32_t long_tokens=0):
        self.long_tokens = long_tokens
        self.heap, self.long_heap = RequestHeap(), RequestHeap()

    def __len__(self):
        return len(self.heap.items) + len(self.long_heap.items)

    cdef Request peek(self, bint skip_long):
        """The next to be admitted, or None; with `skip_long` the next one that is not long."""
        cdef Request first = <Request> self.heap.items[0] if self.heap.items else None
        if skip_long or not self.long_heap.items:
            return first
        cdef Request first_long = <Request> self.long_heap.items[0]
        return first_long if first is None or before(first_long, first) else first

    cdef int push(self, Request request) except -1:
        request.queued_long = 0 < self.long_tokens < request.num_tokens
        return self.long_heap.push(request) if request.queued_long else self.heap.push(request)

    cdef int remove(self, Request request) except -1:
        return self.long_heap.remove(request) if request.queued_long else self.heap.remove(request)

    def in_order(self):
        """The requests, next one first."""
        return sorted([*self.heap.items, *self.long_heap.items], key=_key)

    def check(self):
        """Every request knows its place, and no child comes before its parent."""
        self.heap.check()
        self.long_heap.check()
        for request in self.heap.items:
            assert not (<Request> request).queued_long, repr(request)
        for request in self.long_heap.items:
            assert (<Request> request).queued_long, repr(request)


@cython.final
cdef class RequestHeap:
    """A binary heap of requests by `before`; `Request.queue_at` is the index of each."""

    def __cinit__(self):
        self.items = []

    cdef int push(self, Request request) except -1:
        request.queue_at = <int> len(self.items)
        self.items.append(request)
        return self.sift_up(request.queue_at)

    cdef int remove(self, Request request) except -1:
        cdef Py_ssize_t at = request.queue_at
        cdef Request last = <Request> self.items.pop()
        if last is not request:
            self.items[at] = last
            last.queue_at = <int> at
            self.sift_up(at)
            self.sift_down(last.queue_at)
        request.queue_at = -1
        return 0

    cdef int sift_up(self, Py_ssize_t at) except -1:
        cdef Request moving = <Request> self.items[at]
        cdef Request parent
        while at > 0:
            parent = <Request> self.items[(at - 1) >> 1]
            if not before(moving, parent):
                break
            self.items[at] = parent
            parent.queue_at = <int> at
            at = (at - 1) >> 1
        self.items[at] = moving
        moving.queue_at = <int> at
        return 0

    cdef int sift_down(self, Py_ssize_t at) except -1:
        cdef Py_ssize_t size = len(self.items)
        cdef Py_ssize_t below
        cdef Request moving = <Request> self.items[at]
        cdef Request child
        while True:
            below = 2 * at + 1
            if below >= size:
                break
            if below + 1 < size and before(<Request> self.items[below + 1], <Request> self.items[below]):
                below += 1
            child = <Request> self.items[below]
            if not before(child, moving):
                break
            self.items[at] = child
            child.queue_at = <int> at
            at = below
        self.items[at] = moving
        moving.queue_at = <int> at
        return 0

    def check(self):
        """Every request knows its place, and no child comes before its parent."""
        cdef Py_ssize_t at
        cdef Request request
        for at in range(len(self.items)):
            request = <Request> self.items[at]
            assert request.queue_at == at, f"{request!r} is at {at}, not at {request.queue_at}"
            assert at == 0 or not before(request, <Request> self.items[(at - 1) >> 1]), repr(request)


def _key(Request request):
    return request.rank, request.arrival
