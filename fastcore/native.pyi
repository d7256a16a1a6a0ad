from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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

# ---- CPU kernels: threads, packed matrices, layer operations, attention --------------------------------
#
# Addresses are `tensor.data_ptr()` integers of memory that outlives the call; where only an address is passed, shapes
# are the caller's duty. All long calls release the GIL.

def set_num_threads(count: int) -> None:
    """Threads of the process-wide pool, the calling one included; started when first needed."""

def num_threads() -> int: ...
def stop_threads() -> None:
    """Ends and joins the pool's threads; they are started again when needed."""

def set_isa(name: str) -> None:
    """Forces an instruction-set level ("avx512", "avx2", "generic"); ValueError if it does not run here."""

def isa() -> str: ...
def available_isas() -> list[str]:
    """Levels that run here, best first."""

class PackedMatrix:
    """Weights of a linear layer [n outputs, k inputs], kept in their stored precision, repacked for the kernels."""

    @staticmethod
    def pack(kind: str, data: NDArray[np.uint8], n: int, k: int) -> PackedMatrix:
        """Repacks raw row-major bytes of a kind (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)."""

    @staticmethod
    def concat(parts: Sequence[PackedMatrix]) -> PackedMatrix:
        """Stacks outputs; shares the parts' memory, and their kinds may differ."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def kind(self) -> str:
        """Kind as stored; kinds of a concatenation joined by "+"."""

    @property
    def nbytes(self) -> int: ...
    def rows(self, ids_ptr: int, count: int, out_ptr: int) -> None:
        """out[i] = float32 weights of output ids[i] (int32); IndexError for an id outside [0, n)."""

    def dequantize(self) -> NDArray[np.float32]: ...

def matmul(x_ptr: int, m: int, ldx: int, weights: PackedMatrix, bias_ptr: int, y_ptr: int, ldy: int) -> None:
    """y[m, n] = x[m, k] W^T + bias in float32 (bias_ptr 0: none); strides in elements. Rows are batch-invariant."""

KV_FLOAT32: int
KV_FLOAT16: int
KV_BFLOAT16: int

def rms_norm(x_ptr: int, w_ptr: int, eps: float, y_ptr: int, rows: int, dim: int) -> None: ...
def add_rms_norm(x_ptr: int, residual_ptr: int, w_ptr: int, eps: float, y_ptr: int, rows: int, dim: int) -> None:
    """residual += x; y = rms_norm(residual)."""

def silu_mul(gate_up_ptr: int, y_ptr: int, rows: int, dim: int) -> None:
    """y[rows, dim] = silu(gate) * up for gate_up [rows, 2 * dim]."""

def gelu_tanh_mul(gate_up_ptr: int, y_ptr: int, rows: int, dim: int) -> None: ...
def rope_and_cache(
    qkv_ptr: int,
    num_tokens: int,
    positions_ptr: int,
    cos_sin_ptr: int,
    slot_mapping_ptr: int,
    kv_cache_ptr: int,
    kv_dtype: int,
    q_norm_ptr: int,
    k_norm_ptr: int,
    eps: float,
    q_out_ptr: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    """Rotates (NeoX pairs) q into q_out [T, H * D] and k into the cache [blocks, KH, block_size, 2 * D], with v.

    positions and slot_mapping are int32 [T], slot -1 writes nothing; cos_sin float32 [max_positions, rotary_dim].
    q_norm_ptr and k_norm_ptr (float32 [D], 0: none) normalize each head before the rotation.
    """

def paged_attention(
    q_ptr: int,
    kv_cache_ptr: int,
    kv_dtype: int,
    block_table_ptr: int,
    block_table_stride: int,
    query_start_ptr: int,
    seq_lens_ptr: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
    out_ptr: int,
) -> None:
    """Causal attention of q [T, H, D] into out [T, H, D]; block_table, query_start [S + 1], seq_lens [S] are int32.

    window: keys a query sees at most, itself included (0: all); softcap: 0 for none. Batch-invariant per row.
    """

# ---- tape: kernel calls recorded once and run for every step -------------------------------------------

class Tape:
    """A forward pass as a list of kernel calls with fixed addresses.

    Each method takes the arguments of the kernel of the same name and appends a call. What a step decides, the
    number of rows or tokens and the addresses of its inputs, is ignored there and taken from `run`. Weights are
    kept alive; the memory behind all other addresses is the caller's duty.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add_group(self, slot_mapping_ptr: int, block_table_ptr: int) -> None:
        """Names the next group of layers with a block table of their own, before their calls are recorded.

        Calls with these addresses will take the slots and the block table that `run` gets for the group.
        """

    def rows(self, matrix: PackedMatrix, ids_ptr: int, count: int, out_ptr: int) -> None: ...
    def matmul(
        self, x_ptr: int, m: int, ldx: int, weights: PackedMatrix, bias_ptr: int, y_ptr: int, ldy: int
    ) -> None: ...
    def rms_norm(self, x_ptr: int, w_ptr: int, eps: float, y_ptr: int, rows: int, dim: int) -> None: ...
    def add_rms_norm(
        self, x_ptr: int, residual_ptr: int, w_ptr: int, eps: float, y_ptr: int, rows: int, dim: int
    ) -> None: ...
    def silu_mul(self, gate_up_ptr: int, y_ptr: int, rows: int, dim: int) -> None: ...
    def rope_and_cache(
        self,
        qkv_ptr: int,
        num_tokens: int,
        positions_ptr: int,
        cos_sin_ptr: int,
        slot_mapping_ptr: int,
        kv_cache_ptr: int,
        kv_dtype: int,
        q_norm_ptr: int,
        k_norm_ptr: int,
        eps: float,
        q_out_ptr: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        block_size: int,
    ) -> None: ...
    def paged_attention(
        self,
        q_ptr: int,
        kv_cache_ptr: int,
        kv_dtype: int,
        block_table_ptr: int,
        block_table_stride: int,
        query_start_ptr: int,
        seq_lens_ptr: int,
        num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
        out_ptr: int,
    ) -> None: ...
    def run(
        self,
        num_tokens: int,
        num_seqs: int,
        input_ids_ptr: int,
        positions_ptr: int,
        slot_mapping_ptrs: list[int],
        block_table_ptrs: list[int],
        block_table_stride: int,
        query_start_ptr: int,
        seq_lens_ptr: int,
    ) -> None:
        """Runs all calls in order, without the GIL; all arrays are int32, slots and block tables by group."""

# ---- sampling --------------------------------------------------------------------------------------------

def choose_tokens(
    logits: int,
    stride: int,
    vocab_size: int,
    rows: NDArray[np.int64],
    settings: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    """Takes or draws one token for each of `rows` of the float32 matrix at address `logits`.

    `stride` is in elements. `settings` int32 [n, 10] holds the records of
    `aioengine.sampling_backend.SETTINGS`; `out` int32 [2, n] gets token ids and statuses.
    """

def score_tokens(
    logits: int,
    stride: int,
    vocab_size: int,
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    floor: float,
    logprobs: NDArray[np.float32],
    ranks: NDArray[np.int32],
    offsets: NDArray[np.int64],
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> None:
    """Log-probability and rank of one token for each of `rows`, and the `counts[i]` greatest ones from
    `offsets[i]` on in the two last arrays (-1: all values in the order of the ids, and no ids).

    A rank of 0 says that the row's logits hold NaN or +inf.
    """

class TokenCounts:
    """The tokens of one sequence, for its penalties."""

    def __init__(self, vocab_size: int) -> None: ...
    def reset(self, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]) -> None:
        """Starts over with these tokens."""
    def add(self, token_id: int) -> None:
        """One more output token."""
    def penalize(self, logits: int, settings: NDArray[np.int32]) -> None:
        """Changes the float32 row at address `logits`; `settings` is int32 [1, 10]."""

class Completion:
    """An eventfd that CUDA streams signal; see completion.h."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """The descriptor to watch, -1 once closed."""
    def enqueue(self, stream: int) -> None:
        """Signals once everything enqueued on the stream (its handle) so far is done.

        RuntimeError without a CUDA driver or if it refuses. Must stay open until then.
        """
    def signal(self) -> None:
        """Signals now."""
    def take(self) -> int:
        """How many signals came since the last call; never blocks."""
    def close(self) -> None: ...

def completion_unavailable() -> str | None:
    """Why `Completion.enqueue` cannot work here, or None."""
