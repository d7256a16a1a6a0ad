# A prefix that an operator names: what it holds, and whether a request holds it too.
from libc.stdint cimport int32_t, uint64_t

from aioengine.fastcore.block_hash cimport BlockHasher
from aioengine.fastcore.key_tails cimport KeyTails
from aioengine.fastcore.request cimport Request


cdef class NamedPrefix:
    cdef KeyTails tails
    cdef const int32_t[::1] tokens
    cdef readonly int32_t num_tokens
    cdef readonly int32_t block_size
    cdef readonly int32_t start         # first token of the span
    cdef readonly int32_t span_block    # block of the table in which the span begins
    cdef int32_t num_telling            # tokens that tell whether somebody has that block

    @staticmethod
    cdef NamedPrefix of_block(Request request, int32_t at, int32_t block_size)
    cdef bint is_in(self, Request request) except -1
    cdef bint begins_in(self, Request request) except -1
    cdef bint agrees(self, Request request, int32_t count) except -1
    cdef int hash_at(self, BlockHasher hasher, int32_t at, const uint64_t* parent, uint64_t* out) except -1
