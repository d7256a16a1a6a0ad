"""A journal of the prefix index."""

from typing import Literal, final

Entry = (
    tuple[Literal["stored"], bytes, bytes | None, list[int], bytes]
    | tuple[Literal["removed"], bytes]
    | tuple[Literal["cleared"]]
)
"""("stored", hash, hash of the parent, tokens, tail of the hashed bytes), ("removed", hash) or ("cleared",)."""

@final
class KVJournal:
    """What happened to the index; the KV manager writes it."""

    def __init__(self) -> None: ...
    def take(self) -> list[Entry]:
        """The entries since the last call, oldest first."""
