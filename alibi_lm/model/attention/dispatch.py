"""Causal attention with linear biases: one entry point, and a table of what each kernel supports.

A kernel that cannot apply a request's bias or window is never used for it. Every kernel works in
the dtype of q, k and v, with fp32 scores, biases and softmax, whatever autocast says: a bias cast
to 16 bits is off by whole units a few thousand keys away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from alibi_lm import kernels
from alibi_lm.model.attention import flash_attn, flex
from alibi_lm.model.attention.eager import eager_attention
from alibi_lm.model.attention.sdpa_cpu import HALF_DTYPES, sdpa_cpu_attention
from alibi_lm.model.pruning.block_sparse import AMX_MIN_QUERIES, training_starts
from alibi_lm.model.slopes import Slopes, host_slopes


@dataclass(frozen=True)
class AttentionRequest:
    """The arguments of `attention` beside q, k and v."""

    slopes: Slopes | None
    window: int | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0

    @property
    def needs_slope_gradient(self) -> bool:
        """Whether a gradient of the slopes will be asked for."""
        return isinstance(self.slopes, Tensor) and self.slopes.requires_grad

    @property
    def allows_pruning(self) -> bool:
        """Whether keys may be dropped."""
        return self.epsilon > 0 and self.slopes is not None


@dataclass(frozen=True)
class AttentionKernel:
    """One implementation of attention, and what it supports."""

    run: Callable[[Tensor, Tensor, Tensor, AttentionRequest], Tensor]
    devices: frozenset[str] | None
    """Device types; None is any."""
    dtypes: frozenset[torch.dtype]
    """Dtypes of q, k and v."""
    slopes: bool = True
    """Whether it applies linear biases."""
    slope_gradient: bool = False
    """Whether it computes the gradient of the slopes."""
    window: bool = False
    """Whether it applies a sliding window."""
    bias: bool = False
    """Whether it applies a bias by distance, with its gradient."""
    value_width: bool = False
    """Whether the heads of v may be wider or narrower than those of q and k."""
    pruning_min_queries: int | None = None
    """Fewest queries of which it drops keys as epsilon allows; None: it always reads all keys."""
    widths: tuple[int, int] = (0, 1 << 30)
    """Narrowest and widest heads."""
    min_queries: int = 0
    """Fewest queries that it supports, or is efficient for."""
    missing: Callable[[torch.device], str | None] | None = None
    """What it needs and this machine does not have, or None."""
    tensors_unsupported_reason: Callable[[Tensor, Tensor, Tensor], str | None] | None = None
    """Why it cannot serve q, k and v that meet all the above, or None."""

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
        if request.needs_slope_gradient and not self.slope_gradient:
            return "the gradient of slopes"
        if request.window is not None and not self.window:
            return "a window"
        if request.bias is not None and not self.bias:
            return "a bias by distance"
        if v.shape[-1] != q.shape[-1] and not self.value_width:
            return "a width of v other than that of q and k"
        if not self.widths[0] <= q.shape[-1] <= self.widths[1]:
            return f"heads {q.shape[-1]} wide"
        if q.shape[2] < self.min_queries:
            return f"fewer than {self.min_queries} queries"
        missing = None if self.missing is None else self.missing(q.device)
        if missing or self.tensors_unsupported_reason is None:
            return missing
        return self.tensors_unsupported_reason(q, k, v)

    def prunes(self, num_queries: int) -> bool:
        """Whether it drops keys of that many queries where epsilon allows."""
        return self.pruning_min_queries is not None and num_queries >= self.pruning_min_queries


def _amx(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    backend, slopes, starts = kernels.backend(), host_slopes(request.slopes), None
    assert backend is not None
    if slopes and request.epsilon > 0 and request.window is None:
        starts = training_starts(backend, q, k, slopes, request.epsilon)
    return backend.attention(q, k, v, slopes, request.window, starts)


def _amx_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    backend = kernels.backend()
    if backend is None:
        return kernels.unavailable_reason()
    return backend.attention_unsupported_reason(q, k, v)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    return flash_attn.attention(q, k, v, request.slopes, request.window)


def _flex(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    return flex.attention(q, k, v, request.slopes, request.window, request.epsilon)


def _sdpa_cpu(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    return sdpa_cpu_attention(q, k, v, host_slopes(request.slopes))


def _eager(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    return eager_attention(q, k, v, request.slopes, request.window, request.bias)


# In order of preference. The GPU kernels have not been run on a GPU yet; `alibi-lm bench gpu-check`
# does so.
KERNELS: dict[str, AttentionKernel] = {
    "amx": AttentionKernel(
        _amx,
        frozenset({"cpu"}),
        frozenset({torch.bfloat16}),
        window=True,
        pruning_min_queries=AMX_MIN_QUERIES,
        tensors_unsupported_reason=_amx_unsupported_reason,
    ),
    "flash_attn": AttentionKernel(
        _flash_attn,
        frozenset({"cuda"}),
        HALF_DTYPES,
        window=True,
        widths=(1, flash_attn.WIDEST),
        missing=flash_attn.missing,
    ),
    "flex": AttentionKernel(
        _flex,
        frozenset({"cuda"}),
        HALF_DTYPES | {torch.float32},
        window=True,
        pruning_min_queries=flex.MIN_PRUNED_QUERIES,
        widths=(flex.NARROWEST, flex.WIDEST),
        min_queries=flex.BLOCK,
        missing=flex.missing,
    ),
    "sdpa_cpu": AttentionKernel(_sdpa_cpu, frozenset({"cpu"}), HALF_DTYPES | {torch.float32}),
    "eager": AttentionKernel(
        _eager,
        None,
        HALF_DTYPES | {torch.float32, torch.float64},
        slope_gradient=True,
        window=True,
        bias=True,
        value_width=True,
    ),
}


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> str:
    """The first kernel of the table that can serve the request, one that prunes it before others.

    Raises:
        ValueError: none can.
    """
    names: Iterable[str] = KERNELS
    if request.allows_pruning:
        names = sorted(KERNELS, key=lambda name: not KERNELS[name].prunes(q.shape[2]))
    for name in names:
        if not _reason(name, q, k, v, request):
            return name
    reasons = "; ".join(f"{name}: {_reason(name, q, k, v, request)}" for name in KERNELS)
    raise ValueError(f"no attention kernel supports this request ({reasons})")


def _reason(name: str, q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> str | None:
    return KERNELS[name].unsupported_reason(q, k, v, request)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Slopes | None,
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
        slopes: m_h of the H heads, or None for no linear bias: floats, which the CPU kernels use in
            double precision, or a tensor [H] on the device of q, which may need a gradient.
        window: a query sees the keys i - window < j <= i; None sees all before it.
        bias: [H, N], a bias by distance, added to the scores: column min(i - j, N - 1). It may
            need a gradient.
        epsilon: the probability that each row may drop, from 0 to below 1 (`pruning.bounds` states
            what that means for output and gradients). Kernels that do not prune read everything.
        kernel: a name of `KERNELS` to use; by default `choose_kernel` decides.

    Returns:
        [B, H, Tq, Dv] in the dtype of q. On CPU its memory lies as [B, Tq, H, Dv] where that of
        q does, so that joining the heads copies nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or no kernel, or not the
            one that is named, can serve them.
    """
    _check(q, k, v, slopes, window, bias)
    if window is not None and window >= k.shape[2]:
        window = None
    if isinstance(slopes, Tensor) and not torch.is_grad_enabled():
        slopes = slopes.detach()
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon = {epsilon} is not in [0, 1)")
    request = AttentionRequest(slopes, window, bias, epsilon)
    if kernel is None:
        kernel = choose_kernel(q, k, v, request)
    elif kernel not in KERNELS:
        raise ValueError(f"there is no attention kernel {kernel}; choose one of {list(KERNELS)}")
    elif reason := _reason(kernel, q, k, v, request):
        raise ValueError(f"attention kernel {kernel} does not support {reason}")
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
    slopes: Slopes | None,
    window: int | None,
    bias: Tensor | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention needs q [B,H,Tq,D], k [B,KV,Tk,D], v [B,KV,Tk,Dv]: {shapes}")
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
        raise ValueError(f"window = {window} is not positive")
    if bias is not None and (bias.ndim != 2 or bias.shape[0] != q.shape[1] or not bias.shape[1]):
        raise ValueError(f"bias {tuple(bias.shape)} is not [{q.shape[1]}, N]")
