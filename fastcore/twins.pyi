"""What the groups behind the first one have cached: hung on the first group's blocks."""

from typing import final

from aioengine.fastcore.block_pool import BlockPool

@final
class Twins:
    """Cached blocks of the other groups; `PrefixMap.twins`, None for a cache of one group."""

    num_columns: int
    """Groups but the first."""
    num_entries: int

    def __init__(self, pool: BlockPool, num_columns: int) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Memory of columns and links."""
    def twin(self, primary: int, group: int) -> int:
        """The block of a group (1, 2, ...) that hangs on an indexed block of the first group; 0 = none."""
    def check(self) -> None:
        """Raises AssertionError unless both directions and the blocks' flags agree."""
