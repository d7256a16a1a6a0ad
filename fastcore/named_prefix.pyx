"""A prefix named by its content: token ids, media, salt, and where in it the span begins that is meant.

    tokens | ............... | ...... span_block ...... | ... |
           0                 span_block x block_size          num_tokens
                             <-- all that has this block, as far as the name goes, has the span in view -->

A name without tokens means everything under its salt and extra keys.

Immutable. `cache_control` looks it up in the prefix map, `kv_manager` keeps requests that hold a quarantined
one from publishing it.
"""
import cython

from libc.string cimport memcmp


@cython.final
cdef class NamedPrefix:
    def __cinit__(
        self, const int32_t[::1] token_ids not None, int32_t block_size, *, bytes cache_salt not None=b"",
        bytes extra_keys not None=b"", media=(), int32_t start=-1,
    ):
        self.tokens, self.num_tokens = token_ids, <int32_t> token_ids.shape[0]
        if start == -1:
            start = max(self.num_tokens - 1, 0)
        if not 0 <= start < max(self.num_tokens, 1) or block_size < 1:
            raise ValueError(f"start={start} is not a token of a prefix of {self.num_tokens} tokens")
        self.block_size = block_size
        # What begins behind the name is not of it, though it may be in the same block.
        self.tails = KeyTails(extra_keys, cache_salt, [item for item in media if item[0] < self.num_tokens])
        self.start, self.span_block = start, start // block_size
        self.num_telling = min(self.num_tokens, (self.span_block + 1) * block_size)

    @staticmethod
    cdef NamedPrefix of_block(Request request, int32_t at, int32_t block_size):
        """The name of a full block of a request."""
        cdef NamedPrefix name = NamedPrefix(
            request.token_ids()[: (at + 1) * block_size], block_size, start=at * block_size
        )
        name.tails = request.tails
        return name

    cdef bint is_in(self, Request request) except -1:
        """Whether a request has the block of the span, as far as the name goes."""
        return self.agrees(request, self.num_telling)

    cdef bint begins_in(self, Request request) except -1:
        """Whether a request has the first token of the span and all before it."""
        return self.agrees(request, min(self.start + 1, self.num_tokens))

    cdef bint agrees(self, Request request, int32_t count) except -1:
        """Whether the first `count` tokens of a request, its media, salt and extra keys are those of the name."""
        return (
            request.num_tokens >= count and self.tails.agrees(request.tails, count)
            and (count == 0 or memcmp(request.tokens, &self.tokens[0], count * sizeof(int32_t)) == 0)
        )

    cdef int hash_at(self, BlockHasher hasher, int32_t at, const uint64_t* parent, uint64_t* out) except -1:
        """The hash of a block that the name fills."""
        return hasher.hash_block(
            parent, &self.tokens[<Py_ssize_t> at * self.block_size], self.block_size,
            self.tails.at(at, self.block_size), out,
        )

    def __eq__(self, other):
        if not isinstance(other, NamedPrefix):
            return NotImplemented
        return self.key() == (<NamedPrefix> other).key()

    def __hash__(self):
        return hash(self.key())

    def key(self):
        """What makes two names the same: the telling tokens, what belongs to them, and the span."""
        return (
            bytes(self.tokens[: self.num_telling]), tuple(self.tails.begun(self.num_telling)),
            self.tails.first, self.tails.later, self.span_block, self.block_size,
        )
