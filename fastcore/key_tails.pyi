"""What follows the tokens in the hash of each block of a sequence."""

from collections.abc import Sequence
from typing import final

Media = Sequence[tuple[int, int, bytes]]
"""First token, number of tokens and identifier of each media item (a picture, a sound) of a sequence, in order.

The identifier stands for all that the model sees of the item, so for the number of its tokens too.
Equal tokens with another identifier, or with the item at another place, share no cached block that it is in.
"""

def key_tail(extra_keys: bytes, cache_salt: bytes) -> bytes:
    """The extra keys and the salt as they enter a block's hash, each with its length in front."""

def key_parts(tail: bytes) -> tuple[bytes, bytes, list[tuple[bytes, int]]]:
    """What a block's tail says: extra keys, salt, and of each item in the block the identifier and where it begins.

    That is relative to the block: negative if the item began before it.
    """

@final
class KeyTails:
    """The tails of all blocks of a sequence.

    Args:
        extra_keys: enters every block.
        cache_salt: enters the first.
        media: each item enters the blocks that it overlaps.
        num_tokens: the items must end there.

    Raises:
        ValueError: an item without tokens or identifier, out of order, overlapping the one before it, or not
            within the sequence.
    """

    def __init__(
        self, extra_keys: bytes = b"", cache_salt: bytes = b"", media: Media = (), num_tokens: int = ...
    ) -> None: ...
    def tail(self, block: int, block_size: int) -> bytes:
        """What follows the tokens of a block."""
