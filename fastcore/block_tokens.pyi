"""The token ids of cached blocks."""

from typing import final

@final
class BlockTokens:
    """Token ids by block; only the KV manager reads and writes them."""

    num_blocks: int
    block_size: int

    def __init__(self, num_blocks: int, block_size: int) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Memory of the ids."""
