"""Token ids as callers give them, checked and packed into int32 in one pass.

A long prompt has tens of thousands of ids and the event loop waits meanwhile, so the check is compiled. Owns
nothing; `intake.py` calls it with whatever a caller passed.
"""
import numpy as np

from libc.stdint cimport int32_t, int64_t


def pack_token_ids(list token_ids not None, int64_t vocab_size):
    """[T] int32 of a list of T ids.

    Raises:
        TypeError: an item is not an int (bool is none either); the message says where.
        ValueError: an id is negative or not below `vocab_size`; likewise.
    """
    cdef Py_ssize_t count = len(token_ids)
    packed = np.empty(count, dtype=np.int32)
    cdef int32_t[::1] out = packed
    cdef Py_ssize_t i
    cdef int64_t value
    cdef object item
    for i in range(count):
        item = token_ids[i]
        if not isinstance(item, int) or isinstance(item, bool):
            raise TypeError(f"prompt[{i}]={item!r} is not a token id")
        try:
            value = item
        except OverflowError:
            value = -1
        if not 0 <= value < vocab_size:
            raise ValueError(f"prompt[{i}]={item} is outside the vocabulary (0 to {vocab_size - 1})")
        out[i] = <int32_t> value
    return packed
