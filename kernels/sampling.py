"""Sampling operations in plain torch: the oracle of the GPU kernels, and what runs where there are none.

All work on float32 logits `x` [S, V] of S rows, each row with its own settings in tensors [S]. A row's
result depends on that row only. None of them waits for the device. Called by `aioengine/sampler.py`.

The draw
    token = argmax_v (z_v + g(seed, position, v)) over the tokens that survived the filters; lowest id on ties
    (Gumbel-max: token v wins with probability softmax(z)_v). The noise is a pure function:

        c0, c1, c2, c3 = v >> 2, position, 0, 0            counter, 32-bit words
        k0, k1         = seed & 0xffffffff, seed >> 32     key, the seed as unsigned 64-bit
        r0..r3         = Philox4x32-10(c, k)
        r              = r[v & 3]                           one call serves four neighbouring tokens
        u              = float32(r if r < 2^31 else ~r) * 4.6566127342e-10f      in [0, 1), from 31 bits
        g              = -log(-log1p(-max(u, 2^-32)))

    In Triton: `r0, r1, r2, r3 = tl.philox(seed, v >> 2, position, 0, 0)` with 32-bit counter words, or
    `tl.rand4x(seed, (position << 32) | (v >> 2))` with an int64 offset, which also makes the u. The noise is
    large where u is small, so small u must keep their precision: use log1p, or u + u*u/2 for u < 2^-12,
    never log(1 - u).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_UNIFORM_SCALE = 4.6566127342e-10  # rounds to the float32 below 2^-31, so that u < 1
_UNIFORM_FLOOR = 2.0**-32  # middle of the lowest cell

NEG_INF = float("-inf")


# Constraints: these change x in place. Penalties are in `penalties.py`.


def mask_tokens_ref(x: Tensor, forbidden: Tensor) -> None:
    """Sets x to -inf where `forbidden` bool [S, V] is true."""
    x.masked_fill_(forbidden, NEG_INF)


def add_bias_ref(x: Tensor, row: Tensor, token_id: Tensor, bias: Tensor) -> None:
    """Adds bias [E] to x[row[E], token_id[E]]; a bias of -inf forbids the token. x is contiguous.

    Several for one token are added in any order: all but one of them must be 0 or -inf.
    """
    x.view(-1).index_add_(0, row.long() * x.shape[1] + token_id, bias)


def mask_bad_words_ref(x: Tensor, recent: Tensor, row: Tensor, prefix: Tensor, last_id: Tensor) -> None:
    """Forbids the token that would complete a bad word.

    Args:
        recent: int32 [W, L], the last L output tokens of each word's row, newest last, -1 for none.
        row: int [W], which row of x each word belongs to.
        prefix: int32 [W, L], the word without its last token, newest last, filled with -2 on the left.
        last_id: int [W], the last token of the word.
    """
    matches = ((prefix == recent) | (prefix == -2)).all(-1)
    add_bias_ref(x, row, last_id, torch.where(matches, NEG_INF, 0.0))


# Filters: every one of them keeps the tokens with a logit at or above a threshold, so ties stay together.


def filter_threshold_ref(z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that survives min-p, then top-k, then top-p, for each row: float32 [S].

    Args:
        z: logits after temperature.
        top_k: int64 [S], 1 to V (V keeps all). Tokens as likely as the k-th stay too.
        top_p: float32 [S], above 0; 1 keeps all. The mass is that of the tokens which min-p and top-k left,
            taken from the most likely one down until it reaches top_p; tokens as likely as the last stay too.
        min_p: float32 [S], 0 keeps all.
    """
    ordered = z.sort(-1, descending=True).values
    threshold = torch.maximum(ordered[:, 0] + min_p.log(), ordered.gather(1, top_k[:, None] - 1)[:, 0])
    mass = ordered.masked_fill(ordered < threshold[:, None], NEG_INF).softmax(-1)
    below = mass.double().cumsum(-1) < top_p[:, None]
    last = below.sum(-1).clamp_(max=z.shape[1] - 1)
    nucleus = torch.where(top_p < 1, ordered.gather(1, last[:, None])[:, 0], NEG_INF)
    return torch.maximum(threshold, nucleus)


# The draw.


def philox_4x32_ref(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 (Salmon et al., 2011) on int64 tensors that hold 32-bit words; shapes broadcast."""
    for _ in range(rounds):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B  # the product wraps into the sign; shift and mask undo it
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def random_words_ref(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """The 32-bit words behind the noise of all tokens, as int64 [S, V]; see the head of this file."""
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)[None]
    seeds, positions = seeds[:, None], positions.long()[:, None] & _MASK
    zero = torch.zeros_like(seeds)
    words = philox_4x32_ref(groups, positions, zero, zero, seeds & _MASK, (seeds >> 32) & _MASK)
    return torch.stack(words, -1).flatten(1)[:, :vocab_size]


def gumbel_ref(words: Tensor) -> Tensor:
    """Random 32-bit words (as int64) to float32 Gumbel noise.

    Logarithms in float64 stand for an exact log1p, and give the same bits wherever a token lies in the
    tensor, which torch's log1p does not.
    """
    folded = torch.where(words >= 2**31, words ^ _MASK, words)
    uniform = (folded.float() * _UNIFORM_SCALE).clamp_(min=_UNIFORM_FLOOR).double()
    return uniform.neg_().add_(1).log_().neg_().log_().neg_().float()


def draw_ref(z: Tensor, threshold: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token id per row, int64 [S]: argmax of z plus noise over the tokens with z >= threshold.

    `seeds` int64 [S] (the bits of an unsigned 64-bit key), `positions` int [S], output tokens so far.
    """
    score = z + gumbel_ref(random_words_ref(seeds, positions, z.shape[1]))
    return score.masked_fill_(z < threshold[:, None], NEG_INF).argmax(-1)


# Log-probabilities.


def rank_ref(logprobs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Value and rank (1 + how many are strictly greater) of one token per row."""
    chosen = logprobs.gather(1, token_ids.long()[:, None])
    return chosen[:, 0], (logprobs > chosen).sum(-1) + 1


def top_logprobs_ref(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids int64 and values float32 [S, k] of the k greatest, greatest first, lowest id first on ties."""
    bits = (logprobs + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    width = logprobs.shape[1]
    ids = torch.arange(width - 1, -1, -1, device=logprobs.device)
    keys = ((ordered << 32) | ids).topk(k, -1).values
    top_ids = width - 1 - (keys & _MASK)
    return top_ids, logprobs.gather(1, top_ids)
