# ---- detokenizer -----------------------------------------------------------------------------------------

class Vocabulary:
    """The bytes of every token id. Immutable."""

    SPECIAL: int
    """Flag: left out of a text when special tokens are skipped."""
    ADDED: int
    """Flag: an added token, special or not."""

    def __init__(self, tokens: list[bytes], flags: bytes, strip_first_space: bool = False) -> None:
        """`tokens[i]` are the bytes of id i, `flags[i]` its flags. With `strip_first_space` a whole text
        loses one leading space."""
    def __len__(self) -> int: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty outside the vocabulary."""
    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of a whole sequence; broken UTF-8 becomes U+FFFD."""

class StopSet:
    """Stop texts, compiled. Immutable."""

    def __init__(self, stops: list[str]) -> None: ...

class TextStream:
    """The text of one choice as its tokens come; for one thread.

    An unfinished character is held back, and so is what may still become the beginning of a stop text. The
    stop text that ends first wins; of several that end together the longest. One that is complete within
    the first `min_tokens` tokens is passed over.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        stops: StopSet | None = None,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        strip_first_space: bool = False,
    ) -> None:
        """`strip_first_space` is for a text that stands alone; the output of a model continues its prompt."""
    def push(self, token_ids: list[int]) -> int:
        """Appends tokens; returns how many were used, fewer than given if a stop text was completed."""
    def push_text(self, text: str) -> bool:
        """Appends one token whose text was decoded elsewhere; True if a stop text is complete."""
    def finish(self, tail: str = "") -> None:
        """Makes held-back text final, and `tail` behind it; nothing may be pushed afterwards."""
    def take(self) -> str:
        """The final text that was not taken before."""
    def text_until(self, num_bytes: int) -> str:
        """The first `num_bytes` bytes of final text."""
    @property
    def text(self) -> str:
        """All final text."""
    @property
    def num_taken_bytes(self) -> int:
        """UTF-8 length of everything that `take()` has returned."""
    @property
    def stop_index(self) -> int:
        """Which stop text ended it, -1 for none."""
