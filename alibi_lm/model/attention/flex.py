"""Linear biases on torch's FlexAttention: a fused kernel compiled for bias, mask and shape.

The bias is a function of the score. The causal mask, a window and pruning are one mask of blocks of
`BLOCK` queries and keys: blocks that no query sees are not read, blocks that every query sees whole
need no mask inside. It is compiled on a GPU; on the CPU, in tests, it is torch's own dense formula
of the same bias and mask.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from alibi_lm.model.pruning.bounds import first_key_per_block
from alibi_lm.model.slopes import Slopes, device_slopes

BLOCK = 128
NARROWEST, WIDEST = 16, 256
"""Head widths of its kernels."""
MIN_PRUNED_QUERIES = 4096
"""Shorter sequences are read whole."""

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def missing(device: torch.device) -> str | None:
    """What this kernel needs and this machine does not have, or None."""
    if importlib.util.find_spec("triton") is None:
        return "without the package triton"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    window: int | None,
    epsilon: float = 0.0,
) -> Tensor:
    """Attention of `dispatch.attention` without bias by distance.

    Args:
        q: [B, H, Tq, D].
        k, v: [B, KV, Tk, D].
        slopes: H slopes or None.
        window: keys that a query sees, itself included, or None.
        epsilon: the probability that each row may drop.

    Returns:
        [B, H, Tq, D].
    """
    run: Callable[..., object] = flex_attention
    if q.device.type == "cuda":
        run = _compiled()
    head_slopes = None if slopes is None else device_slopes(slopes, q.device)
    mask = block_mask(q, k, head_slopes, window, epsilon)
    bias = None if head_slopes is None else score_function(head_slopes, k.shape[2] - q.shape[2])
    output = run(q, k, v, score_mod=bias, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return cast(Tensor, output)


@cache
def _compiled() -> Callable[..., object]:
    return cast(Callable[..., object], torch.compile(flex_attention))


def score_function(slopes: Tensor, offset: int) -> ScoreFunction:
    """score - m_h (i - j) for m [H] fp32 and i = row + offset."""

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (row + offset - key)

    return biased


def block_mask(
    q: Tensor, k: Tensor, slopes: Tensor | None, window: int | None, epsilon: float
) -> BlockMask:
    """Which blocks of keys each block of queries reads, whole or through a mask.

    With pruning it differs by sequence and head. It is planned from q and k on their device,
    without waiting for it.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if slopes is None or epsilon <= 0 or num_queries < MIN_PRUNED_QUERIES:
        return _plain_mask(num_queries, num_keys, window, q.device)
    first = first_key_per_block(q, k, slopes, epsilon, BLOCK) // BLOCK * BLOCK
    return _mask(num_queries, num_keys, window, first)


@lru_cache(maxsize=16)
def _plain_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> BlockMask:
    # A tensor created in inference mode could not be used in a later training step.
    with torch.inference_mode(False), torch.no_grad():
        blocks = -(-num_queries // BLOCK)
        first = torch.zeros(1, 1, blocks, dtype=torch.int64, device=device)
        return _mask(num_queries, num_keys, window, first)


def _mask(num_queries: int, num_keys: int, window: int | None, first: Tensor) -> BlockMask:
    """The mask of blocks that read from `first` [B or 1, H or 1, blocks] on."""
    offset, device = num_keys - num_queries, first.device
    # [query blocks, 1] against [key blocks]: first and last position of each.
    low = offset + BLOCK * torch.arange(first.shape[2], device=device).unsqueeze(1)
    high = (low + BLOCK - 1).clamp(max=num_keys - 1)
    begin = BLOCK * torch.arange(-(-num_keys // BLOCK), device=device)
    end = begin + BLOCK - 1
    # Without a window, further than any key.
    width = num_keys + BLOCK if window is None else window
    wanted = begin >= first.unsqueeze(3)
    some = wanted & (begin <= high) & (end > low - width)
    every = wanted & (end <= low) & (begin > high - width)
    counts, indices = _ordered(some & ~every)
    full_counts, full_indices = _ordered(every)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_function(offset, window, first),
        seq_lengths=(num_queries, num_keys),
    )


def _mask_function(offset: int, window: int | None, first: Tensor) -> MaskFunction:
    many_batches, many_heads = first.shape[0] > 1, first.shape[1] > 1

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        position = row + offset
        start = first[batch if many_batches else 0, head if many_heads else 0, row // BLOCK]
        inside = (key <= position) & (key >= start)
        return inside if window is None else inside & (position - key < window)

    return seen


def _ordered(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Number of wanted blocks of each row, and all blocks' indices, the wanted ones first."""
    order = wanted.int().argsort(dim=3, descending=True, stable=True)
    return wanted.sum(dim=3, dtype=torch.int32), order.int()
