"""The compiled attention kernel behind autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_lm.kernels.amx.build import unavailable_reason

BLOCK = 64
"""Queries of a block: `kQueries` of the C++."""
MIN_QUERIES = 16
"""The kernel computes 64 queries at a time; with fewer than this, most of that would be wasted."""
MIN_ROWS = 512
"""The backward pass starts from the output rounded to bf16. The error averages out over many rows,
but with as few as this it could be as large as the gradient."""
MAX_KEYS = 1 << 24
"""fp32 holds every smaller distance exactly."""


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """See `Backend.attention_unsupported_reason`."""
    if q.shape[-1] % 2:
        return f"a head width of {q.shape[-1]}"
    if q.shape[2] < MIN_QUERIES or q.shape[0] * q.shape[1] * q.shape[2] <= MIN_ROWS:
        return f"as few queries as {q.shape[2]}"
    if k.shape[2] >= MAX_KEYS:
        return f"{k.shape[2]} keys"
    return unavailable_reason()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...] | None,
    window: int | None,
    starts: Tensor | None = None,
) -> Tensor:
    """See `Backend.attention`; the result's memory lies as [B, Tq, H, D]."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _AmxAttention.apply(q, k, v, slopes or (), window or 0, starts)


def attention_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], starts: Tensor
) -> tuple[Tensor, Tensor]:
    """See `Backend.attention_with_logsumexp`; last dimensions are contiguous."""
    output, logsumexp = torch.ops.alibi_lm.attention_forward(q, k, v, slopes, 0, starts)
    return output, logsumexp


def first_key_per_block(q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float) -> Tensor:
    """See `Backend.first_key_per_block`; `block_starts.h` has the bound.

    Raises:
        RuntimeError: the kernel is not available on this machine.
    """
    if reason := unavailable_reason():
        raise RuntimeError(f"no compiled kernel: {reason}")
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.detach(), k.detach()))
    return torch.ops.alibi_lm.attention_starts(q, k, slopes, epsilon)


class _AmxAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: tuple[float, ...],
        window: int,
        starts: Tensor | None,
    ) -> Tensor:
        output, logsumexp = torch.ops.alibi_lm.attention_forward(q, k, v, slopes, window, starts)
        ctx.slopes, ctx.window, ctx.starts = slopes, window, starts
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dq, dk, dv = torch.ops.alibi_lm.attention_backward(
            grad, *ctx.saved_tensors, ctx.slopes, ctx.window, ctx.starts
        )
        return dq, dk, dv, None, None, None
