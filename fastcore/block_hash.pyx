"""Chained hashes of full blocks, H(parent hash, token ids, extra keys): one hash names a whole prefix.

Owns the byte layout that is hashed and the root of the chains. Does not know which blocks exist or where
their hashes are kept; `kv_manager` asks for the hashes of a request's full blocks.

    hashed bytes = parent digest (16 or 32) | token ids, int32 little endian | tail
    tail         = what else determines the block's KV (key_tails)

XXH3 of a block takes less time than a call from Python, so the function is called where the module xxhash has it
from: libxxhash, which it links or brings along. A build of the module that hides it costs time, not hits: the same
digest then comes through the module.
"""
import hashlib
import os

import cython
import xxhash
import xxhash._xxhash

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.string cimport memcmp, memcpy, memset


cdef extern from "dlfcn.h":
    const int RTLD_LAZY
    void* dlopen(const char* path, int mode)
    void* dlsym(void* library, const char* name)

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define aio_big_endian(word) (word)
    #else
    #define aio_big_endian(word) __builtin_bswap64(word)
    #endif
    """
    uint64_t aio_big_endian(uint64_t word) noexcept nogil


# Processes that use sha256 share keys only if they start from the same root (INV-03).
cdef bytes SHARED_ROOT_SEED = b"aioengine prefix cache root, version 1"


def _sha256(data):
    return hashlib.sha256(data).digest()


@cython.final
cdef class BlockHasher:
    def __cinit__(self, str algo="xxh3_128", root_seed=None, *, bint through_python=False):
        if algo == "xxh3_128":
            self.digest, self.digest_size = xxhash.xxh3_128_digest, 16
            # Not predictable from outside, so that nobody can prepare colliding prompts (INV-03).
            seed = os.urandom(32) if root_seed is None else root_seed
            if not through_python:
                self.compile()
        elif algo == "sha256":
            self.digest, self.digest_size = _sha256, 32
            seed = SHARED_ROOT_SEED if root_seed is None else root_seed
        else:
            raise ValueError(f"hash_algo={algo!r} must be xxh3_128 or sha256")
        self.algo, self.words = algo, self.digest_size // 8
        memset(&self.root, 0, sizeof(Hash))
        cdef bytes root = self.digest(b"root" + bytes(seed))
        memcpy(&self.root, PyBytes_AS_STRING(root), self.digest_size)

    def __dealloc__(self):
        PyMem_Free(self.payload)

    cdef int compile(self) except -1:
        """Takes libxxhash's function, if it is there and gives what the module gives."""
        cdef void* library = dlopen(os.fsencode(xxhash._xxhash.__file__), RTLD_LAZY)
        if library == NULL:
            return 0
        self.compiled = <Digest128Of> dlsym(library, "XXH3_128bits")
        if self.compiled == NULL:
            return 0
        cdef bytes sample = bytes(range(256))
        cdef bytes expected = self.digest(sample)
        cdef Hash own
        digest128(self.compiled, PyBytes_AS_STRING(sample), 256, own.word)
        if memcmp(&own, PyBytes_AS_STRING(expected), 16) != 0:
            self.compiled = NULL
        return 0

    @property
    def is_compiled(self):
        """Whether hashes are computed without going through Python."""
        return self.compiled != NULL

    cdef int hash_path(
        self, const int32_t* tokens, int32_t block_size, KeyTails tails, uint64_t* hashes, int32_t start, int32_t end
    ) except -1:
        """Hashes the full blocks `start` to `end` of a sequence, each from the one before (B3, INV-12)."""
        cdef uint64_t* own = hashes + <Py_ssize_t> start * self.words
        cdef int32_t i
        if self.compiled != NULL and tails.media is None:
            return self.hash_plain_path(tokens, block_size, tails, own, start, end)
        for i in range(start, end):
            self.hash_block(
                &self.root.word[0] if i == 0 else own - self.words, tokens + <Py_ssize_t> i * block_size, block_size,
                tails.at(i, block_size), own,
            )
            own += self.words
        return 0

    cdef int hash_plain_path(
        self, const int32_t* tokens, int32_t block_size, KeyTails tails, uint64_t* own, int32_t start, int32_t end
    ) except -1:
        """As `hash_path` for XXH3 where all blocks but the first have the same tail: it is put behind them once."""
        cdef size_t tokens_size = block_size * sizeof(int32_t)
        cdef size_t size = 0
        cdef const uint64_t* parent
        cdef bytes tail
        cdef int32_t i
        for i in range(start, end):
            if i == start or i == 1:
                tail = tails.first if i == 0 else tails.later
                size = 16 + tokens_size + PyBytes_GET_SIZE(tail)
                if size > self.payload_size:
                    self.reserve(size)
                memcpy(self.payload + 16 + tokens_size, PyBytes_AS_STRING(tail), PyBytes_GET_SIZE(tail))
            parent = &self.root.word[0] if i == 0 else own - 2
            memcpy(self.payload, parent, 16)
            if tokens_size == 64:  # a copy of a size that the compiler knows is no call
                memcpy(self.payload + 16, tokens + <Py_ssize_t> i * 16, 64)
            else:
                memcpy(self.payload + 16, tokens + <Py_ssize_t> i * block_size, tokens_size)
            digest128(self.compiled, self.payload, size, own)
            own += 2
        return 0

    cdef int hash_block(
        self, const uint64_t* parent, const int32_t* tokens, int32_t num_tokens, bytes tail, uint64_t* out
    ) except -1:
        cdef size_t tokens_size = num_tokens * sizeof(int32_t)
        cdef size_t tail_size = PyBytes_GET_SIZE(tail)
        cdef size_t size = self.digest_size + tokens_size + tail_size
        if size > self.payload_size:
            self.reserve(size)
        memcpy(self.payload, parent, self.digest_size)
        memcpy(self.payload + self.digest_size, tokens, tokens_size)
        memcpy(self.payload + self.digest_size + tokens_size, PyBytes_AS_STRING(tail), tail_size)
        if self.compiled != NULL:
            digest128(self.compiled, self.payload, size, out)
            return 0
        cdef bytes digest = self.digest(PyBytes_FromStringAndSize(self.payload, size))
        memcpy(out, PyBytes_AS_STRING(digest), self.digest_size)
        return 0

    cdef int reserve(self, size_t size) except -1:
        cdef char* payload = <char*> PyMem_Realloc(self.payload, size)
        if payload == NULL:
            raise MemoryError()
        self.payload, self.payload_size = payload, size
        return 0

    cdef bytes as_bytes(self, const uint64_t* hash):
        return PyBytes_FromStringAndSize(<const char*> hash, self.digest_size)

    def chain(self, token_ids, int block_size, bytes extra_keys=b"", bytes cache_salt=b"", media=()):
        """The hashes of all full blocks of a sequence."""
        cdef int32_t count = len(token_ids) // block_size
        cdef int32_t[::1] tokens = memoryview(bytearray(4 * max(1, len(token_ids)))).cast("i")
        cdef uint64_t* hashes = <uint64_t*> PyMem_Malloc(max(1, <Py_ssize_t> count) * self.digest_size)
        cdef Py_ssize_t i
        try:
            if hashes == NULL:
                raise MemoryError()
            for i in range(len(token_ids)):
                tokens[i] = token_ids[i]
            tails = KeyTails(extra_keys, cache_salt, media, len(token_ids))
            self.hash_path(&tokens[0], block_size, tails, hashes, 0, count)
            return [self.as_bytes(hashes + i * self.words) for i in range(count)]
        finally:
            PyMem_Free(hashes)


cdef inline void digest128(Digest128Of function, const char* data, size_t size, uint64_t* out) noexcept nogil:
    """A 128-bit hash in the byte order that the module xxhash writes it in."""
    cdef Digest128 digest = function(data, size)
    out[0], out[1] = aio_big_endian(digest.high), aio_big_endian(digest.low)
