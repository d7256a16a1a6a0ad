# What follows the tokens in the hash of each block of a sequence.
from libc.stdint cimport int32_t, int64_t


cdef class KeyTails:
    cdef bytes first    # of the first block, if no media item is in it
    cdef bytes later    # and of every other
    cdef tuple media    # (start, end, identifier) in order; None: there are no items, and `at` is one of two
    cdef list ends      # of the items

    cdef bytes at(self, int32_t block, int32_t block_size)
    cdef bytes with_media(self, bytes tail, int64_t start, int64_t end)
    cdef list begun(self, int32_t count)
    cdef bint agrees(self, KeyTails other, int32_t count) except -1
