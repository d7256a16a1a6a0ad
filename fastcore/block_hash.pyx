"""Chained hashes of full blocks, H(parent hash, token ids, extra keys): one hash names a whole prefix.

Owns the byte layout that is hashed and the root of the chains. Does not know which blocks exist or where
their hashes are kept; `kv_manager` asks for one hash per full block.

    hashed bytes = parent digest (16 or 32) | token ids, int32 little endian | tail
    tail         = u32 length, extra keys | u32 length, cache salt (length 0 after the first block)
"""
import hashlib
import os

import cython
import xxhash

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy, memset

# Processes that use sha256 share keys only if they start from the same root (INV-03).
cdef bytes SHARED_ROOT_SEED = b"aioengine prefix cache root, version 1"


def _sha256(data):
    return hashlib.sha256(data).digest()


def key_tail(bytes extra_keys, bytes cache_salt):
    """The last part of the hashed bytes; lengths in front keep (ab, c) apart from (a, bc) (INV-13)."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in (extra_keys, cache_salt))


@cython.final
cdef class BlockHasher:
    def __cinit__(self, str algo="xxh3_128", root_seed=None):
        if algo == "xxh3_128":
            self.digest, self.digest_size = xxhash.xxh3_128_digest, 16
            # Not predictable from outside, so that nobody can prepare colliding prompts (INV-03).
            seed = os.urandom(32) if root_seed is None else root_seed
        elif algo == "sha256":
            self.digest, self.digest_size = _sha256, 32
            seed = SHARED_ROOT_SEED if root_seed is None else root_seed
        else:
            raise ValueError(f"hash_algo={algo!r} must be xxh3_128 or sha256")
        self.algo = algo
        memset(&self.root, 0, sizeof(Hash))
        cdef bytes root = self.digest(b"root" + bytes(seed))
        memcpy(&self.root, PyBytes_AS_STRING(root), self.digest_size)

    cdef int hash_block(
        self, const Hash* parent, const int32_t* tokens, int32_t num_tokens, bytes tail, Hash* out
    ) except -1:
        cdef Py_ssize_t tokens_size = num_tokens * sizeof(int32_t)
        cdef Py_ssize_t tail_size = PyBytes_GET_SIZE(tail)
        cdef bytes payload = PyBytes_FromStringAndSize(NULL, self.digest_size + tokens_size + tail_size)
        cdef char* at = PyBytes_AS_STRING(payload)
        memcpy(at, parent, self.digest_size)
        memcpy(at + self.digest_size, tokens, tokens_size)
        memcpy(at + self.digest_size + tokens_size, PyBytes_AS_STRING(tail), tail_size)
        cdef bytes digest = self.digest(payload)
        memset(out, 0, sizeof(Hash))
        memcpy(out, PyBytes_AS_STRING(digest), self.digest_size)
        return 0

    cdef bytes as_bytes(self, const Hash* hash):
        return PyBytes_FromStringAndSize(<const char*> hash, self.digest_size)

    def chain(self, token_ids, int block_size, bytes extra_keys=b"", bytes cache_salt=b""):
        """The hashes of all full blocks of a sequence; the step path computes them block by block."""
        cdef int32_t[::1] tokens = memoryview(bytearray(4 * max(1, len(token_ids)))).cast("i")
        cdef Py_ssize_t i
        for i in range(len(token_ids)):
            tokens[i] = token_ids[i]
        cdef list hashes = []
        cdef Hash parent = self.root
        cdef Hash current
        for i in range(len(token_ids) // block_size):
            tail = key_tail(extra_keys, b"" if i else cache_salt)
            self.hash_block(&parent, &tokens[i * block_size], block_size, tail, &current)
            hashes.append(self.as_bytes(&current))
            parent = current
        return hashes
