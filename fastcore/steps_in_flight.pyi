"""The steps that were launched and not updated yet, and what must wait for them."""

from typing import final

from aioengine.fastcore.kv_manager import KVManager

@final
class StepsInFlight:
    """Used by the scheduler only."""

    def __init__(self, kv: KVManager, rows: object) -> None: ...
    def __len__(self) -> int: ...
