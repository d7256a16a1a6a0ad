"""The block tables of the groups behind the first one."""

from typing import final

from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.groups import KVGroups
from aioengine.fastcore.prefix_map import PrefixMap
from aioengine.fastcore.request import Request

@final
class GroupTables:
    """Does for the other groups what `KVManager`, its only caller, does for the first one."""

    groups: KVGroups

    def __init__(self, groups: KVGroups, pool: BlockPool, prefix_map: PrefixMap) -> None: ...
    def check(self, request: Request, counts: dict[int, int]) -> None:
        """Raises AssertionError unless a request's tables are sound; adds an owner to `counts` per block held."""
