"""Attention in plain torch operations: slower than the other kernels, supports every request."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from alibi_lm.model.slopes import Slopes

# Scores in memory at a time: 64 MiB in fp32.
MAX_SCORES = 1 << 24


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    window: int | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention of `dispatch.attention`, in query chunks, with fp32 (or fp64) scores and softmax.

    Memory is that of one chunk of queries against all keys. With gradients, several chunks are
    recomputed in the backward pass.

    Args:
        q: [B, H, Tq, D], not empty.
        k: [B, KV, Tk, D].
        v: [B, KV, Tk, Dv].
        slopes: H slopes or None; a tensor may need a gradient.
        window: keys that a query sees, or None.
        bias: [H, N] by distance, or None.

    Returns:
        [B, H, Tq, Dv].
    """
    offset = k.shape[2] - q.shape[2]
    span = k.shape[2] if window is None else min(window + 1024, k.shape[2])
    chunk = min(1024, max(16, MAX_SCORES // (q.shape[0] * q.shape[1] * span)))
    if window is not None:
        # A chunk reads chunk + window - 1 keys, of which a query needs `window`.
        chunk = min(chunk, max(128, window))
    outputs = []
    for first in range(0, q.shape[2], chunk):
        end = min(first + chunk, q.shape[2])
        low = 0 if window is None else max(0, offset + first - window + 1)
        part = (
            q[:, :, first:end],
            k[:, :, low : offset + end],
            v[:, :, low : offset + end],
            slopes,
            window,
            bias,
        )
        if torch.is_grad_enabled() and q.shape[2] > chunk:
            outputs.append(checkpoint(_one_chunk, *part, use_reentrant=False))
        else:
            outputs.append(_one_chunk(*part))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return joined.transpose(1, 2)


def _one_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    window: int | None,
    bias: Tensor | None,
) -> Tensor:
    """The last q.shape[2] of the positions of k as [B, c, H, Dv]."""
    batch, heads, num_queries, width = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Heads of a group share their keys: one product for all of them.
    grouped = (q.to(compute) * (1 / math.sqrt(width))).reshape(batch, kv_heads, -1, width)
    scores = _Product.apply(grouped, k.to(compute).transpose(-1, -2)).view(
        batch, heads, num_queries, num_keys
    )
    scores = scores + _score_bias(q, num_keys, slopes, window, bias, compute)
    weights = scores.softmax(dim=-1)
    mixed = _Product.apply(weights.view(batch, kv_heads, -1, num_keys), v.to(compute))
    return mixed.view(batch, heads, num_queries, -1).transpose(1, 2).to(q.dtype)


class _Product(torch.autograd.Function):
    """a @ b whose gradients keep their precision when the backward pass runs under autocast."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return grad @ b.transpose(-1, -2), a.transpose(-1, -2) @ grad


def _score_bias(
    q: Tensor,
    num_keys: int,
    slopes: Slopes | None,
    window: int | None,
    bias: Tensor | None,
    compute: torch.dtype,
) -> Tensor:
    """All biases of the last positions' scores, -inf at masked keys: [H or 1, c, num_keys]."""
    num_queries = q.shape[2]
    positions = torch.arange(num_keys, device=q.device)
    distances = positions[num_keys - num_queries :, None] - positions
    unseen = distances < 0
    if window is not None:
        unseen = unseen | (distances >= window)
    total = torch.zeros(1, num_queries, num_keys, dtype=compute, device=q.device)
    if slopes is not None:
        if not isinstance(slopes, Tensor):
            slopes = torch.tensor(slopes, dtype=torch.float64, device=q.device)
        total = total - slopes.to(compute).view(-1, 1, 1) * distances.to(compute)
    if bias is not None:
        total = total + bias.to(compute)[:, distances.clamp(0, bias.shape[1] - 1)]
    return total.masked_fill(unseen, -math.inf)
