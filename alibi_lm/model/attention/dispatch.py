"""Causal attention with linear biases: one entry point, and a table of what each kernel can do.

A kernel that cannot apply a request's bias or window is never used for it. Every kernel works in
the dtype of q, k and v, with fp32 scores, biases and softmax, whatever autocast says: a bias cast
to 16 bits is off by whole units a few thousand keys away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alibi_lm import kernels
from alibi_lm.model.attention import flash_attn, flex
from alibi_lm.model.attention.eager import eager_attention
from alibi_lm.model.attention.sdpa_cpu import sdpa_cpu_attention
from alibi_lm.model.pruning.block_bounds import first_key_per_block
from alibi_lm.model.pruning.sdpa_block_sparse import block_sparse_sdpa, plan_block_groups

AMX_MIN_QUERIES = 1024
"""Shorter sequences are read densely by the native kernel."""
AMX_TIGHT_BOUND_MIN_QUERIES = 8192
"""From here on its horizons are those of `reach`, which read less and cost more to find."""
AMX_MIN_PRUNED_SHARE = 0.25
"""It uses horizons where they leave out at least this share of the keys before the blocks."""


@dataclass(frozen=True)
class AttentionRequest:
    """What is asked of a kernel beyond q, k and v."""

    slopes: tuple[float, ...] | Tensor | None
    """A tensor where their gradient is wanted."""
    window: int | None
    bias: Tensor | None
    epsilon: float = 0.0
    """What each row may leave out of its probability."""


@dataclass(frozen=True)
class AttentionKernel:
    """One way to compute attention, and what it can be asked for."""

    run: Callable[[Tensor, Tensor, Tensor, AttentionRequest], Tensor]
    devices: frozenset[str] | None
    """Device types; None is any."""
    dtypes: frozenset[torch.dtype]
    """Dtypes of q, k and v."""
    slopes: bool = True
    """Whether it applies linear biases."""
    slope_gradient: bool = False
    """Whether it gives the gradient of the slopes."""
    window: bool = False
    """Whether it applies a sliding window."""
    bias: bool = False
    """Whether it applies a bias by distance, with its gradient."""
    value_width: bool = False
    """Whether the heads of v may have another width than those of q and k."""
    pruning: bool = False
    """Whether it leaves out what epsilon allows; the others read everything."""
    widths: tuple[int, int] = (0, 1 << 30)
    """Narrowest and widest heads."""
    least_queries: int = 0
    """Fewest queries that it is worth, or made for."""
    missing: Callable[[torch.device], str | None] | None = None
    """What it needs and this machine does not have; None where nothing is missing."""
    tensors_unsupported_reason: Callable[[Tensor, Tensor, Tensor], str | None] | None = None
    """What else keeps it from q, k and v that pass all the above."""

    def unsupported_reason(
        self, q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest
    ) -> str | None:
        """Why this kernel cannot serve the request, or None where it can."""
        if self.devices is not None and q.device.type not in self.devices:
            return f"device {q.device.type}"
        if q.dtype not in self.dtypes:
            return f"dtype {q.dtype}"
        if request.slopes is not None and not self.slopes:
            return "linear biases"
        if isinstance(request.slopes, Tensor) and not self.slope_gradient:
            return "the gradient of slopes"
        if request.window is not None and not self.window:
            return "a window"
        if request.bias is not None and not self.bias:
            return "a bias by distance"
        if v.shape[-1] != q.shape[-1] and not self.value_width:
            return "a width of v other than that of q and k"
        if not self.widths[0] <= q.shape[-1] <= self.widths[1]:
            return f"heads {q.shape[-1]} wide"
        if q.shape[2] < self.least_queries:
            return f"fewer than {self.least_queries} queries"
        missing = None if self.missing is None else self.missing(q.device)
        if missing or self.tensors_unsupported_reason is None:
            return missing
        return self.tensors_unsupported_reason(q, k, v)


def _flash(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    assert not isinstance(request.slopes, Tensor)
    if request.slopes is not None and request.epsilon > 0:
        plan = plan_block_groups(q, k, request.slopes, request.epsilon)
        if plan is not None:
            return block_sparse_sdpa(q, k, v, request.slopes, plan)
    return sdpa_cpu_attention(q, k, v, request.slopes)


def _native(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    assert not isinstance(request.slopes, Tensor)
    starts = None
    if request.slopes and request.epsilon > 0 and request.window is None:
        starts = _native_starts(q, k, request.slopes, request.epsilon)
    backend = kernels.backend()
    assert backend is not None
    return backend.attention(q, k, v, request.slopes, request.window, starts)


def _native_starts(
    q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float
) -> Tensor | None:
    """The first key of each block of queries, or None where horizons would save too little.

    Longer sequences are worth the tighter bound of `reach`, which costs several times as much.
    """
    backend = kernels.backend()
    assert backend is not None
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_queries < AMX_MIN_QUERIES or min(slopes) <= 0:
        return None
    if num_queries < AMX_TIGHT_BOUND_MIN_QUERIES:
        starts = backend.first_key_per_block(q, k, slopes, epsilon)
    else:
        starts = first_key_per_block(q, k, slopes, epsilon, backend.block).int()
    before = torch.arange(num_keys - num_queries, num_keys, backend.block)
    left_out = starts.sum() / (before.sum() * starts.shape[0] * starts.shape[1])
    return starts if float(left_out) >= AMX_MIN_PRUNED_SHARE else None


def _flex(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    assert not isinstance(request.slopes, Tensor)
    return flex.attention(q, k, v, request.slopes, request.window, request.epsilon)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    assert not isinstance(request.slopes, Tensor)
    return flash_attn.attention(q, k, v, request.slopes, request.window)


def _eager(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    return eager_attention(q, k, v, request.slopes, request.window, request.bias)


def _backend_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    backend = kernels.backend()
    if backend is None:
        return kernels.unavailable_reason()
    return backend.attention_unsupported_reason(q, k, v)


_HALF = frozenset({torch.bfloat16, torch.float16})

# In order of preference; "amx" is compiled where it is first used. None has been run on a
# GPU yet: `alibi-lm bench gpu-check` does that.
KERNELS: dict[str, AttentionKernel] = {
    "amx": AttentionKernel(
        _native,
        frozenset({"cpu"}),
        frozenset({torch.bfloat16}),
        window=True,
        pruning=True,
        tensors_unsupported_reason=_backend_unsupported_reason,
    ),
    "flash_attn": AttentionKernel(
        _flash_attn,
        frozenset({"cuda"}),
        _HALF,
        window=True,
        widths=(1, flash_attn.WIDEST),
        missing=flash_attn.missing,
    ),
    "flex": AttentionKernel(
        _flex,
        frozenset({"cuda"}),
        _HALF | {torch.float32},
        window=True,
        pruning=True,
        widths=(flex.NARROWEST, flex.WIDEST),
        least_queries=flex.BLOCK,
        missing=flex.missing,
    ),
    "sdpa_cpu": AttentionKernel(_flash, frozenset({"cpu"}), _HALF | {torch.float32}, pruning=True),
    "eager": AttentionKernel(
        _eager,
        None,
        _HALF | {torch.float32, torch.float64},
        slope_gradient=True,
        window=True,
        bias=True,
        value_width=True,
    ),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: tuple[float, ...] | Tensor | None,
    window: int | None = None,
    bias: Tensor | None = None,
    epsilon: float = 0.0,
    kernel: str | None = None,
) -> Tensor:
    """softmax(q.k/sqrt(D) - m_h (i - j) + bias_h(i - j)) v over the keys j <= i.

    Args:
        q: [B, H, Tq, D]; the queries are the last Tq of the Tk positions (Tq < Tk when decoding
            with a cache).
        k: [B, KV, Tk, D], where KV divides H; query head h reads key head h // (H / KV).
        v: [B, KV, Tk, Dv].
        slopes: m_h of the H heads, or None for no linear bias. A tensor [H] may need a gradient.
        window: a query sees the keys i - window < j <= i; None sees all before it.
        bias: [H, N], a bias by distance, added to the scores: column min(i - j, N - 1). It may
            need a gradient.
        epsilon: probability that each row may leave out (`flash_horizon` says what that means for
            output and gradients), from 0 to below 1. Where nothing is to be gained, or the kernel
            has no horizons, nothing is left out.
        kernel: a name of `KERNELS` to insist on; by default the first that can serve.

    Returns:
        [B, H, Tq, Dv] in the dtype of q. On CPU its memory lies as [B, Tq, H, Dv] where that of
        q does, so that joining the heads copies nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or a kernel that cannot
            do what is asked.
    """
    _check(q, k, v, slopes, window, bias)
    if window is not None and window >= k.shape[2]:
        window = None
    if isinstance(slopes, Tensor) and not (torch.is_grad_enabled() and slopes.requires_grad):
        slopes = tuple(slopes.tolist())
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon = {epsilon} is not in [0, 1)")
    request = AttentionRequest(slopes, window, bias, epsilon)
    if kernel is None:
        kernel = next(
            name for name in KERNELS if not KERNELS[name].unsupported_reason(q, k, v, request)
        )
    lacking = KERNELS[kernel].unsupported_reason(q, k, v, request)
    if lacking:
        raise ValueError(f"attention kernel {kernel} cannot do {lacking}")
    if q.numel() == 0:
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return KERNELS[kernel].run(q, k, v, request)
    return KERNELS[kernel].run(q, k, v, request)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...] | Tensor | None,
    window: int | None,
    bias: Tensor | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention wants q [B,H,Tq,D], k [B,KV,Tk,D], v [B,KV,Tk,Dv]: {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"batch, head width or head counts do not fit: {shapes}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"the queries must be the last of the keys' positions: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        # A cast would hide that a cache was filled in another precision.
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices differ: q {q.device}, k {k.device}, v {v.device}")
    if slopes is not None and len(slopes) != q.shape[1]:
        raise ValueError(f"{len(slopes)} slopes for {q.shape[1]} heads")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys")
    if bias is not None and (bias.ndim != 2 or bias.shape[0] != q.shape[1] or not bias.shape[1]):
        raise ValueError(f"bias {tuple(bias.shape)} is not [{q.shape[1]}, N]")
