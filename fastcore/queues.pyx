"""The queue of waiting requests: a binary heap that knows where each request sits.

Owns the order of admission: (priority, arrival) under the priority policy, arrival alone under FCFS. The
scheduler pushes, peeks and removes. Arrival is fixed when a request is added, so a preempted one returns to
the front of those that came after it, and holding a request back never reorders the others (INV-34).

Why not a deque for FCFS: an abort has to leave from the middle, here in O(log n), and one structure serves
both policies.
"""
import cython

from aioengine.fastcore.request cimport Request


@cython.final
cdef class WaitQueue:
    def __cinit__(self, bint by_priority):
        self.heap = []
        self.by_priority = by_priority

    def __len__(self):
        return len(self.heap)

    cdef Request peek(self):
        """The next to be admitted, or None."""
        return <Request> self.heap[0] if self.heap else None

    cdef int push(self, Request request) except -1:
        request.queue_at = <int> len(self.heap)
        self.heap.append(request)
        self.sift_up(request.queue_at)
        return 0

    cdef int remove(self, Request request) except -1:
        cdef Py_ssize_t at = request.queue_at
        cdef Request last = <Request> self.heap.pop()
        if last is not request:
            self.heap[at] = last
            last.queue_at = <int> at
            self.sift_up(at)
            self.sift_down(last.queue_at)
        request.queue_at = -1
        return 0

    cdef bint before(self, Request a, Request b) noexcept:
        if self.by_priority and a.priority != b.priority:
            return a.priority < b.priority
        return a.arrival < b.arrival

    cdef int sift_up(self, Py_ssize_t at) except -1:
        cdef Request moving = <Request> self.heap[at]
        cdef Request parent
        while at > 0:
            parent = <Request> self.heap[(at - 1) >> 1]
            if not self.before(moving, parent):
                break
            self.heap[at] = parent
            parent.queue_at = <int> at
            at = (at - 1) >> 1
        self.heap[at] = moving
        moving.queue_at = <int> at
        return 0

    cdef int sift_down(self, Py_ssize_t at) except -1:
        cdef Py_ssize_t size = len(self.heap)
        cdef Py_ssize_t below
        cdef Request moving = <Request> self.heap[at]
        cdef Request child
        while True:
            below = 2 * at + 1
            if below >= size:
                break
            if below + 1 < size and self.before(<Request> self.heap[below + 1], <Request> self.heap[below]):
                below += 1
            child = <Request> self.heap[below]
            if not self.before(child, moving):
                break
            self.heap[at] = child
            child.queue_at = <int> at
            at = below
        self.heap[at] = moving
        moving.queue_at = <int> at
        return 0

    def in_order(self):
        """The requests, next one first."""
        if self.by_priority:
            return sorted(self.heap, key=_priority_key)
        return sorted(self.heap, key=_arrival_key)

    def check(self):
        """Every request knows its place, and no child comes before its parent."""
        cdef Py_ssize_t at
        cdef Request request
        for at in range(len(self.heap)):
            request = <Request> self.heap[at]
            assert request.queue_at == at, f"{request!r} is at {at}, not at {request.queue_at}"
            assert at == 0 or not self.before(request, <Request> self.heap[(at - 1) >> 1]), repr(request)


def _arrival_key(Request request):
    return request.arrival


def _priority_key(Request request):
    return request.priority, request.arrival
