"""The gates of admission: who may not start yet although a row and tokens are left."""

from collections.abc import Hashable
from typing import final

from aioengine.fastcore.kv_manager import KVManager

@final
class Admission:
    """Made by the scheduler, which asks it; other code promises blocks here."""

    full_sequence_must_fit: bool
    watermark_blocks: int
    max_partial: int
    max_long_partial: int
    long_tokens: int
    num_promised: int
    """Blocks kept for all promises together."""

    def __init__(
        self,
        kv: KVManager,
        *,
        full_sequence_must_fit: bool,
        watermark: float,
        max_partial: int,
        max_long_partial: int,
        long_tokens: int,
    ) -> None: ...
    def promise(self, key: Hashable, num_blocks: int) -> None:
        """Keeps blocks from newcomers under a key, in place of what it kept before; 0 keeps nothing.

        For whatever will need blocks and is not a running request yet, such as KV that is being loaded. Who
        promises takes the promise back: while it stands, a request may wait although nothing runs.

        Raises:
            ValueError: the number is negative, or all promises together exceed the pool.
        """
