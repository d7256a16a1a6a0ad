"""The pool of KV blocks and its free list."""

from typing import final

@final
class BlockPool:
    """`num_blocks` block records (block 0 is the null block) and the free list in eviction order.

    The engine reaches it through `KVManager`; the methods ending in `_id` serve tests.

    Raises:
        ValueError: fewer than 2 blocks.
    """

    num_blocks: int
    """All blocks, the null block included."""
    num_free: int
    """Blocks without an owner, those that still hold a cached prefix included."""
    num_taken: int
    """How often a block got its first owner."""
    num_returned: int
    """How often a block lost its last owner."""

    def __init__(self, num_blocks: int) -> None: ...
    def free_ids(self) -> list[int]:
        """The free blocks in the ring's order: under the policy lru the next victim first."""
    def candidates(self) -> list[int] | None:
        """Under the policy cost the blocks to choose from once nothing unhashed or prewarmed is free."""
    @property
    def num_bytes(self) -> int:
        """Memory of the records."""
    def num_refs(self, block_id: int) -> int:
        """Owners of a block."""
    def is_hashed(self, block_id: int) -> bool:
        """Whether the block is in the prefix map."""
    def take_id(self) -> int:
        """Takes the next victim; 0 if none is free."""
    def acquire_id(self, block_id: int) -> None:
        """Adds an owner; a free block leaves the free list."""
    def hit_id(self, block_id: int) -> None:
        """Adds an owner who found the block by its hash: it counts as used, and no longer as prewarmed."""
    def set_prewarmed(self, block_id: int) -> None:
        """Marks a hashed block as cached ahead of need; ValueError if it has no hash or no owner."""
    def release_id(self, block_id: int) -> None:
        """Removes an owner; ValueError if there is none."""
    def check(self) -> None:
        """Walks every record and raises AssertionError on the first contradiction."""
