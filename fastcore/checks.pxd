# Whether the scheduler's records contradict each other.
from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.limits cimport Limits
from aioengine.fastcore.steps_in_flight cimport StepsInFlight


cdef int check_requests(
    list running, list waiting, list held, StepsInFlight in_flight, Limits limits, KVManager kv
) except -1
