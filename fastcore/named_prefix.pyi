"""A prefix named by its content."""

from typing import final

import numpy as np
import numpy.typing as npt

from aioengine.fastcore.key_tails import Media

@final
class NamedPrefix:
    """Token ids, media and salt of a prefix, and the token with which the span begins that is meant.

    Args:
        token_ids: kept, not copied; must not change. Without any, everything under the salt and the extra
            keys is meant.
        media: as in `Request`. Items that begin behind the prefix do not matter; one may reach behind its end.
        start: first token of the span; -1 is the last token, so that only what holds the whole name is meant.

    Raises:
        ValueError: `start` is not a token of the prefix; media items that `KeyTails` refuses.
    """

    num_tokens: int
    block_size: int
    start: int
    """First token of the span."""
    span_block: int
    """Index of the block in which the span begins."""

    def __init__(
        self,
        token_ids: npt.NDArray[np.int32],
        block_size: int,
        *,
        cache_salt: bytes = b"",
        extra_keys: bytes = b"",
        media: Media = (),
        start: int = -1,
    ) -> None: ...
