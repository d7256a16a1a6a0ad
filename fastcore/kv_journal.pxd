# What happened to the prefix index since somebody last looked.
from libc.stdint cimport int32_t


cdef class KVJournal:
    cdef list entries

    cdef int stored(self, bytes hash, bytes parent, const int32_t* tokens, int32_t num_tokens, bytes tail) except -1
    cdef int removed(self, bytes hash) except -1
    cdef int cleared(self) except -1
