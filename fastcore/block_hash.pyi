"""Chained hashes of full blocks."""

from collections.abc import Sequence
from typing import Literal, final

from aioengine.fastcore.key_tails import Media

@final
class BlockHasher:
    """Hashes blocks with `xxh3_128` or `sha256`.

    Args:
        root_seed: what all chains start from. None means 32 random bytes for xxh3_128, a fixed public
            string for sha256.
        through_python: compute xxh3_128 through the module xxhash even if its library can be called directly.

    Raises:
        ValueError: an unknown algorithm.
    """

    algo: str
    digest_size: int
    """Bytes per hash: 16 or 32."""

    def __init__(
        self,
        algo: Literal["xxh3_128", "sha256"] = "xxh3_128",
        root_seed: bytes | None = None,
        *,
        through_python: bool = False,
    ) -> None: ...
    @property
    def is_compiled(self) -> bool:
        """Whether hashes are computed without going through Python."""
    def chain(
        self,
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: bytes = b"",
        cache_salt: bytes = b"",
        media: Media = (),
    ) -> list[bytes]:
        """The hashes of all full blocks of a sequence.

        Raises:
            ValueError: media items that `KeyTails` refuses.
        """
