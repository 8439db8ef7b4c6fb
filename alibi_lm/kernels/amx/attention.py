"""The compiled kernel behind autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_lm.kernels.amx.build import unavailable

BLOCK = 64
"""Queries of a block: `kQueries` of the C++."""
FEWEST_QUERIES = 16
"""The kernel takes 64 queries at a time; with less than this, most of its work would be thrown
away."""
FEWEST_ROWS = 512
"""Its backward pass starts from the output rounded to bf16. That averages out over many rows, but
with as few as this could be as large as the gradient."""
MOST_KEYS = 1 << 24
"""Up to here fp32 holds every distance exactly."""


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot serve these tensors of `attention.attention`, or None."""
    if q.shape[-1] % 2:
        return f"a head width of {q.shape[-1]}"
    if q.shape[2] < FEWEST_QUERIES or q.shape[0] * q.shape[1] * q.shape[2] <= FEWEST_ROWS:
        return f"as few queries as {q.shape[2]}"
    if k.shape[2] >= MOST_KEYS:
        return f"{k.shape[2]} keys"
    return unavailable()


def amx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...] | None,
    window: int | None,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention of `attention.attention` without learned bias.

    Args:
        q: [B, H, Tq, D] in bf16, D even.
        k, v: [B, KV, Tk, D].
        slopes: H slopes or None.
        window: keys that a query sees, or None.
        starts: int32 [B, H, blocks of `BLOCK` queries], keys before which a block need not read;
            forward and backward pass leave out the same ones. None reads all.

    Returns:
        [B, H, Tq, D], whose memory lies as [B, Tq, H, D].
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Native.apply(q, k, v, slopes or (), window or 0, starts)


def amx_first_key_per_block(
    q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float
) -> Tensor:
    """`amx_attention`'s starts, such that each row leaves out at most epsilon of itself.

    From norms and each row's own score alone, in time linear in the length (`reach.h` has the
    bound).

    Args:
        q: [B, H, Tq, D] in bf16.
        k: [B, KV, Tk, D].
        slopes: H slopes, all above 0.
        epsilon: above 0 and below 1.

    Raises:
        RuntimeError: this machine has no such kernel.
    """
    if reason := unavailable():
        raise RuntimeError(f"no compiled kernel: {reason}")
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.detach(), k.detach()))
    return torch.ops.alibi_lm.attention_starts(q, k, slopes, epsilon)


class _Native(torch.autograd.Function):
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
