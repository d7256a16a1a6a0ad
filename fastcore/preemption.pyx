"""Who makes way for whom: the victims of a running request that needs blocks, and of an urgent waiting one.

Owns the choice, nothing else; the scheduler takes blocks and rows from those chosen and queues them again.
`queues.before` is a total order that never changes, and every victim stands behind the one it makes way for:
two requests can never take turns in preempting each other.
"""
import cython

from aioengine.fastcore.queues cimport before


cdef Py_ssize_t least_important(list running, bint by_priority) except -1:
    """The index of the next victim. FCFS: the one admitted last. Priority: the last by rank (C16)."""
    cdef Py_ssize_t worst = len(running) - 1
    cdef Py_ssize_t i
    if by_priority:
        for i in range(worst):
            if before(<Request> running[worst], <Request> running[i]):
                worst = i
    return worst


cdef list victims_for(
    Request urgent, int32_t num_hits, list running, Admission admission, int64_t num_rows, int64_t num_blocks
):
    """The fewest of the least important requests that have so many rows and blocks, or None (C25).

    Only a request of a larger priority number makes way, and only if it also stands behind by rank: age alone
    preempts nobody, and no importance preempts what has waited its time. `num_hits` blocks of the urgent
    request's table are its prefix hits. All or nobody: a victim that does not help would recompute for nothing.
    """
    cdef list chosen = []
    cdef Request victim
    for candidate in running:
        victim = <Request> candidate
        if victim.priority > urgent.priority and before(urgent, victim):
            chosen.append(victim)
    chosen.sort(key=_rank, reverse=True)
    cdef Py_ssize_t count = 0
    while num_rows > 0 or num_blocks > 0:
        if count == len(chosen):
            return None
        victim = <Request> chosen[count]
        num_rows -= 1
        num_blocks -= admission.kv.num_freed(victim, urgent, num_hits) + admission.reserved_for(victim)
        count += 1
    return chosen[:count]


def _rank(Request request):
    return request.rank, request.arrival
