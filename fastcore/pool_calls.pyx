"""Calls of the KV manager for many requests one after the other, as the scheduler makes them: from compiled code.

For `aioengine bench core` alone, which times them.
"""
from libc.stdint cimport int32_t

from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.request cimport Request


def admit_all(KVManager kv not None, list requests not None, int32_t num_hits, int32_t num_tokens):
    """Admits each with what was matched; there are blocks for all."""
    for request in requests:
        if not kv.admit(<Request?> request, num_hits, num_tokens):
            raise ValueError(f"there are too few blocks for {request!r}")


def match_all(KVManager kv not None, list requests not None):
    """Matches each."""
    for request in requests:
        kv.match(<Request?> request)


def publish_all(KVManager kv not None, list requests not None, int32_t num_computed):
    """Offers the full blocks of each."""
    for request in requests:
        kv.publish(<Request?> request, num_computed)


def release_all(KVManager kv not None, list requests not None):
    """Gives back the blocks of each."""
    for request in requests:
        kv.release(<Request?> request)
