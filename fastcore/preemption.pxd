# Who makes way for whom.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.admission cimport Admission
from aioengine.fastcore.request cimport Request


cdef Py_ssize_t least_important(list running, bint by_priority) except -1
cdef list victims_for(
    Request urgent, int32_t num_hits, list running, Admission admission, int64_t num_rows, int64_t num_blocks
)
