"""What follows the tokens in the hash of each block: whatever else determines the block's KV (INV-13).

Owns the byte layout of tails. Does not hash: `block_hash` asks for the tail of each block that it hashes.

    tail = u32 length, extra keys | u32 length, cache salt (length 0 after the first block)
           then for each media item that overlaps the block, in order:
           u32 length, identifier | int32 first token of the item minus first token of the block

A media item (a picture, a sound) stands in the sequence as a run of tokens that are alike for all of its kind; its
identifier stands for its content. So the item enters the hash of every block that it overlaps, and with the place
where it begins, or the same item one token further on would be a hit (INV-14). Blocks before it do not know of
it: prompts that differ in a later picture share all before it. A tail follows from the block's place alone, so
that hashing may stop and resume anywhere. Without items a tail has nothing behind the salt.
"""
from bisect import bisect_right

import cython


def key_tail(bytes extra_keys, bytes cache_salt):
    """Extra keys and salt; lengths in front keep (ab, c) apart from (a, bc) (INV-13)."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in (extra_keys, cache_salt))


def key_parts(bytes tail not None):
    """The other way round: extra keys, salt and the media items (identifier, begin relative to the block)."""
    cdef list media = []
    extra_keys, at = part_at(tail, 0)
    cache_salt, at = part_at(tail, at)
    while at < len(tail):
        identifier, at = part_at(tail, at)
        media.append((identifier, int.from_bytes(tail[at : at + 4], "little", signed=True)))
        at += 4
    return extra_keys, cache_salt, media


cdef tuple part_at(bytes tail, Py_ssize_t at):
    """A part and where the next one begins."""
    cdef Py_ssize_t end = at + 4 + int.from_bytes(tail[at : at + 4], "little")
    return tail[at + 4 : end], end


cdef tuple checked(media, int64_t num_tokens):
    """The items as (start, end, identifier)."""
    cdef list items = []
    cdef int64_t start, length
    cdef int64_t reached = 0
    for i, (start, length, identifier) in enumerate(media):
        if not isinstance(identifier, bytes) or not identifier:
            raise ValueError(f"media item {i}: the identifier must be non-empty bytes, not {identifier!r}")
        if length < 1:
            raise ValueError(f"media item {i} has {length} tokens; it must have at least one")
        if start < 0 or length > num_tokens - start:
            raise ValueError(f"media item {i}: {length} tokens from {start} are not within the {num_tokens} there are")
        if start < reached:
            raise ValueError(
                f"media item {i} begins at {start}, before the end of the one before it at {reached}: items must "
                "be in order and must not overlap"
            )
        reached = start + length
        items.append((start, reached, identifier))
    return tuple(items)


@cython.final
cdef class KeyTails:
    def __cinit__(
        self, bytes extra_keys not None=b"", bytes cache_salt not None=b"", media=(), int64_t num_tokens=0x7FFFFFFF
    ):
        self.first, self.later = key_tail(extra_keys, cache_salt), key_tail(extra_keys, b"")
        self.media = checked(media, num_tokens) or None
        if self.media is not None:
            self.ends = [end for _, end, _ in self.media]

    cdef bytes at(self, int32_t block, int32_t block_size):
        """The tail of a block."""
        cdef bytes tail = self.first if block == 0 else self.later
        if self.media is None:
            return tail
        return self.with_media(tail, <int64_t> block * block_size, (<int64_t> block + 1) * block_size)

    cdef bytes with_media(self, bytes tail, int64_t start, int64_t end):
        """A tail and the items that overlap the block from `start` to `end`."""
        cdef Py_ssize_t i = bisect_right(self.ends, start)
        cdef list parts = [tail]
        while i < len(self.media) and self.media[i][0] < end:
            begin, _, identifier = self.media[i]
            parts += (len(identifier).to_bytes(4, "little"), identifier)
            parts.append((begin - start).to_bytes(4, "little", signed=True))
            i += 1
        return tail if len(parts) == 1 else b"".join(parts)

    cdef list begun(self, int32_t count):
        """The items that begin in the first `count` tokens; where they end, their identifiers say."""
        return [(start, identifier) for start, _, identifier in self.media or () if start < count]

    cdef bint agrees(self, KeyTails other, int32_t count) except -1:
        """Whether sequences whose first `count` tokens are equal are the same as far as that."""
        if self.first != other.first or self.later != other.later:
            return False
        return self.media is other.media or self.begun(count) == other.begun(count)

    def __eq__(self, other):
        if not isinstance(other, KeyTails):
            return NotImplemented
        cdef KeyTails tails = other
        return self.first == tails.first and self.later == tails.later and self.media == tails.media

    def __hash__(self):
        return hash((self.first, self.later, self.media))

    def tail(self, int32_t block, int32_t block_size):
        """What follows the tokens of a block."""
        if block < 0 or block_size < 1:
            raise ValueError(f"there is no block {block} of {block_size} tokens")
        return self.at(block, block_size)
