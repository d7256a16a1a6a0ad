"""Whether the scheduler's records contradict each other: for tests and the simulation, after every step.

Reads everything and changes nothing. O(pool).
"""
import cython

from aioengine.fastcore.request cimport FINISHED, HELD, PREEMPTED, RUNNING, WAITING, Request


cdef int check_requests(
    list running, list waiting, list held, StepsInFlight in_flight, Limits limits, KVManager kv
) except -1:
    """Raises AssertionError, naming a request, if its place, counters, row or blocks cannot be right."""
    cdef Request request
    cdef list rows = in_flight.rows.idle_rows()
    kv.check([*running, *in_flight.deferred])
    for request in running:
        rows.append(request.row)
        assert request.state == RUNNING and request.queue_at == -1, repr(request)
        assert request.step_tokens == 0, f"{request!r} was left half scheduled"
        assert request.num_computed_tokens <= request.num_blocks * kv.block_size, repr(request)
        assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight, repr(request)
        assert request.num_computed_tokens <= limits.max_model_len, repr(request)
        assert request.num_published * kv.block_size <= request.num_computed_tokens, repr(request)
    for request in [*waiting, *held]:
        assert request.state in (WAITING, PREEMPTED, HELD), repr(request)
        assert (request.state == HELD) == (request.queue_at == -1), repr(request)
        assert request.num_computed_tokens == 0 and request.row == -1, repr(request)
        assert request.num_blocks == 0 or (request.is_fenced and kv.remote is not None), repr(request)
    for request in in_flight.deferred:
        assert request.state in (FINISHED, PREEMPTED) and in_flight.may_write(request), repr(request)
        assert request.is_fenced and request.num_blocks > 0, repr(request)
    assert sorted(rows) == list(range(limits.max_num_seqs)), f"rows are lost or used twice: {sorted(rows)}"
    for request in [*running, *waiting]:
        assert request.num_in_flight == in_flight.num_samples_of(request), repr(request)
    return 0
