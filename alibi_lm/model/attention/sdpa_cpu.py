"""ALiBi on torch's fused CPU attention kernel, forward and backward.

Softmax ignores a constant of a row, so the bias -m(i - j) may be given by key alone, as m(j - z)
for any z: a [1, H, 1, T] tensor. Its rounding in fp32 grows with the distance from z, so queries
go in chunks of at most `QUERY_CHUNK`, each with z at its own last position. A chunk after the
first reads its own keys causally and all keys before it without a mask; the two results are merged
by their log-sum-exp. The backward pass gives each part the merged output and log-sum-exp, from
which the kernel recovers the true probabilities exp(score - lse) (as ring attention does, Liu et
al. 2023).

The kernel is called by its private name because the public function silently falls back to other
kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERY_CHUNK = 1024

# The kernel's backward pass starts from the rounded output. The error averages out over many
# rows; with as few as this it could be as large as the gradient, and wider inputs cost nothing.
FEW_ROWS = 512
WIDE_BACKWARD = 256
"""Queries up to which the kernel's backward pass is faster in fp32 than in 16 bits (3 times at 128
queries of heads 32 or 64 wide, 1.4 times at 256, 0.8 times at 512, on one core with AMX)."""
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}

HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})

sdpa_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The kernel itself: output and log-sum-exp."""
sdpa_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def sdpa_cpu_attention(q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...] | None) -> Tensor:
    """Attention of `dispatch.attention` without window and learned bias.

    Args:
        q: [B, H, Tq, D], not empty, on the CPU, in fp32, bf16 or fp16.
        k, v: [B, KV, Tk, D].
        slopes: H slopes or None.

    Returns:
        [B, H, Tq, D].
    """
    # The kernel assumes that the last dimension is contiguous.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not tracked:
        outputs = [part[0] for part in _chunks_forward(q, k, v, slopes)]
        return outputs[0] if len(outputs) == 1 else _join(q, outputs)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    if rows <= FEW_ROWS and q.dtype in _WIDER:
        wider = _WIDER[q.dtype]
        return _Flash.apply(q.to(wider), k.to(wider), v.to(wider), slopes).to(q.dtype)
    return _Flash.apply(q, k, v, slopes)


def key_bias(slopes: tuple[float, ...] | None, num_keys: int, dtype: torch.dtype) -> Tensor | None:
    """m_h (j - (num_keys - 1)) for j < num_keys as [1, H, 1, num_keys], a view of a cache.

    fp32 for q, k, v of at most 32 bits; fp64 for fp64, where the kernel would misread an fp32 bias.
    """
    if slopes is None:
        return None
    # Powers of two, so that decoding token by token does not build a table for every length.
    capacity = max(256, 1 << (num_keys - 1).bit_length())
    bias_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return _bias_table(slopes, capacity, bias_dtype)[..., capacity - num_keys :]


@lru_cache(maxsize=32)  # learned slopes: a table for every block
def _bias_table(slopes: tuple[float, ...], capacity: int, dtype: torch.dtype) -> Tensor:
    # A tensor created in inference mode could not be used in a later training step.
    with torch.inference_mode(False), torch.no_grad():
        distances = torch.arange(capacity - 1, -1, -1, dtype=torch.float64, device="cpu")
        heads = torch.tensor(slopes, dtype=torch.float64, device="cpu").view(1, -1, 1, 1)
        return (-heads * distances).to(dtype)


def _blocks(start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Key blocks (first, end, causal) that the queries at positions [start, stop) need."""
    if stop - start == 1:
        return [(0, stop, False)]
    if start == 0:
        return [(0, stop, True)]
    return [(0, start, False), (start, stop, True)]


def _chunks(num_queries: int) -> list[tuple[int, int]]:
    return [
        (start, min(start + QUERY_CHUNK, num_queries))
        for start in range(0, num_queries, QUERY_CHUNK)
    ]


def _chunks_forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...] | None
) -> list[tuple[Tensor, Tensor]]:
    """Output [B, H, c, D] and log-sum-exp [B, H, c] of each query chunk."""
    offset = k.shape[2] - q.shape[2]
    results = []
    for first, end in _chunks(q.shape[2]):
        bias = key_bias(slopes, offset + end, q.dtype)
        queries = q[:, :, first:end]
        for start, stop, causal in _blocks(offset + first, offset + end):
            part, part_lse = sdpa_cpu_forward(
                queries,
                k[:, :, start:stop],
                v[:, :, start:stop],
                0.0,
                causal,
                attn_mask=None if bias is None else bias[..., start:stop],
            )
            if start == 0:
                output, lse = part, part_lse
            else:
                output = output.to(lse.dtype)
                merge_part(output, lse, part, part_lse)
        results.append((output.to(q.dtype), lse))
    return results


def merge_part(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part over further keys into an output and its log-sum-exp, in place.

    Args:
        output: [..., n, D], in the dtype of lse.
        lse: [..., n].
        part: [..., n, D] over the further keys, in any dtype.
        part_lse: [..., n].
    """
    # The share from the difference: an error of the sum would not cancel.
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    output.lerp_(part.to(output.dtype), share)
    torch.logaddexp(lse, part_lse, out=lse)


def _join(q: Tensor, outputs: list[Tensor]) -> Tensor:
    """Chunks [B, H, c, D] as one [B, H, Tq, D] whose memory lies as [B, Tq, H, D]."""
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1).transpose(1, 2)


class _Flash(torch.autograd.Function):
    """The chunked kernel with the backward pass of the whole row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...] | None
    ) -> Tensor:
        outputs, logsumexps = zip(*_chunks_forward(q, k, v, slopes), strict=True)
        output = outputs[0] if len(outputs) == 1 else _join(q, list(outputs))
        ctx.slopes = slopes
        ctx.save_for_backward(q, k, v, output, *logsumexps)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, *logsumexps = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        groups = q.shape[1] // k.shape[1]
        dtype = q.dtype
        if q.shape[2] <= WIDE_BACKWARD and dtype in HALF_DTYPES:
            grad, q, k, v, output = (x.float() for x in (grad, q, k, v, output))
            wide = _chunks_backward(grad, q, k, v, output, logsumexps, ctx.slopes)
            dq, dk, dv = (x.to(dtype) for x in wide)
        elif groups > 1 and dtype in HALF_DTYPES:
            # The kernel would sum the heads of a group in 16 bits.
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            dq, dk, dv = _chunks_backward(grad, q, k, v, output, logsumexps, ctx.slopes)
            dk, dv = (
                x.unflatten(1, (-1, groups)).sum(2, dtype=torch.float32).to(q.dtype)
                for x in (dk, dv)
            )
        else:
            dq, dk, dv = _chunks_backward(grad, q, k, v, output, logsumexps, ctx.slopes)
        return dq, dk, dv, None


def _chunks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexps: list[Tensor],
    slopes: tuple[float, ...] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Sums over blocks are fp32 (or fp64), rounded once at the end."""
    offset = k.shape[2] - q.shape[2]
    chunks = _chunks(q.shape[2])
    single = len(chunks) == 1 and len(_blocks(offset, k.shape[2])) == 1
    wide = logsumexps[0].dtype
    dqs: list[Tensor] = []
    dk = dv = grad
    if not single:
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    for (first, end), lse in zip(chunks, logsumexps, strict=True):
        bias = key_bias(slopes, offset + end, q.dtype)
        dq: Tensor | None = None
        for start, stop, causal in _blocks(offset + first, offset + end):
            part_q, part_k, part_v = sdpa_cpu_backward(
                grad[:, :, first:end],
                q[:, :, first:end],
                k[:, :, start:stop],
                v[:, :, start:stop],
                output[:, :, first:end],
                lse,
                0.0,
                causal,
                attn_mask=None if bias is None else bias[..., start:stop],
            )
            if single:
                return part_q, part_k, part_v
            dk[:, :, start:stop] += part_k
            dv[:, :, start:stop] += part_v
            dq = part_q if dq is None else dq.to(wide) + part_q
        assert dq is not None
        dqs.append(dq.to(q.dtype))
    return dqs[0] if len(dqs) == 1 else _join(q, dqs), dk.to(k.dtype), dv.to(v.dtype)
