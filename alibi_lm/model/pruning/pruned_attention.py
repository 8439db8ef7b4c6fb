"""Attention that reads as far as `horizon` proves necessary.

Queries go in blocks, whole ones together (`query_blocks`; in bf16 on a CPU with AMX
`compiled_blocks`), and the rest in a block of its own. Both round a part to the dtype of q. In 16
bits the dense path has such parts too where it has many rows and keys; where it has not, everything
is widened, and the certificate's "errors like those of the dense path" holds there as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.pruning.amx_block_sparse import AmxBlockSparseAttention, amx_unsupported_reason
from alibi_lm.model.pruning.block_sparse import (
    BLOCK,
    LOCAL_KEYS,
    BlockSpans,
    BlockSparseAttention,
    KVSource,
)
from alibi_lm.model.pruning.bounds import KeyNormBound

CHUNK = 8192
"""Queries whose reaches are found together."""
WIDE_UP_TO = 4096
"""Up to this many keys, torch's kernel is given 16-bit inputs in fp32."""


@dataclass
class ResidentKV:
    """All keys and values in memory."""

    keys: Tensor
    values: Tensor
    ball: KeyNormBound
    start: int = 0

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Never needed: all keys are at hand."""
        raise IndexError(f"keys {first} to {stop} lie before the first")


def pruned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: tuple[float, ...],
    epsilon: float,
    reaches: list[BlockSpans] | None = None,
) -> Tensor:
    """`attention.attention` with biases by slope, that leaves out at most `epsilon` of each row.

    For every input, |o - o'| <= 2 epsilon max|v| for the dense output o, beside rounding errors
    like those of the dense path. Where nothing can be left out (epsilon 0, few keys, a slope that
    is not positive, a device other than the CPU, fp64) it is the dense path. No gradients.

    Args:
        q: [B, H, Tq, D]; the queries are the last Tq of the Tk positions.
        k, v: [B, KV, Tk, D].
        slopes: m_h of the H heads.
        epsilon: probability that may be left out, of each head and row.
        reaches: takes up how far each block read.

    Returns:
        [B, H, Tq, D].

    Raises:
        ValueError: epsilon is not in [0, 1), a gradient is wanted, or `attention` refuses.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon = {epsilon} is not in [0, 1)")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("horizon_attention has no gradient: use torch.no_grad()")
    if not can_leave_out(q, k, slopes, epsilon) or v.shape[-1] != q.shape[-1]:
        return attention(q, k, v, slopes=slopes)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        outputs = [
            _sequence(*parts, slopes, epsilon, reaches) for parts in zip(q, k, v, strict=True)
        ]
    return torch.stack(outputs).transpose(1, 2)


def can_leave_out(q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float) -> bool:
    """Whether horizons can be shorter than the input at all."""
    kernel = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return (
        epsilon > 0
        and kernel
        and min(slopes) > 0
        and k.shape[2] > LOCAL_KEYS + BLOCK
        and q.numel() > 0
    )


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...],
    epsilon: float,
    reaches: list[BlockSpans] | None,
) -> Tensor:
    """[H, Tq, D] queries of one sequence to [Tq, H, D]."""
    dtype = q.dtype
    whole = q[:, : q.shape[1] - q.shape[1] % BLOCK]
    if k.shape[1] <= WIDE_UP_TO and amx_unsupported_reason(whole, k, v) is not None:
        q, k, v = q.float(), k.float(), v.float()
    k, v = k.contiguous(), v.contiguous()
    offset = k.shape[1] - q.shape[1]
    ball = KeyNormBound(k[:, :CHUNK])
    ball.add(k[:, :offset])
    out = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=dtype)
    for first in range(0, q.shape[1], CHUNK):
        stop = min(first + CHUNK, q.shape[1])
        ball.add(k[:, offset + first : offset + stop])
        source = ResidentKV(k[:, : offset + stop], v[:, : offset + stop], ball)
        part, reach = attend(q[:, first:stop], source, offset + first, slopes, epsilon)
        out[first:stop] = part.transpose(0, 1)
        if reaches is not None:
            reaches.extend(reach)
    return out


def attend(
    q: Tensor, source: KVSource, first: int, slopes: tuple[float, ...], epsilon: float
) -> tuple[Tensor, list[BlockSpans]]:
    """Attention of queries at positions `first` on, the last of the source's.

    Args:
        q: [H, n, D].
        source: keys and values up to the last query's; those of the queries and the `LOCAL_KEYS`
            before them are resident.
        first: position of the first query.
        slopes: of the H heads.
        epsilon: above 0.

    Returns:
        [H, n, D] in the dtype of q, and how far the blocks read.
    """
    if q.stride(-1) != 1:
        q = q.contiguous()
    outputs, reaches = [], []
    whole = q.shape[1] - q.shape[1] % BLOCK
    for begin, end, rows in ((0, whole, BLOCK), (whole, q.shape[1], q.shape[1] - whole)):
        if begin < end:
            queries = q[:, begin:end]
            kind = BlockSparseAttention
            if (
                rows == BLOCK
                and amx_unsupported_reason(queries, source.keys, source.values) is None
            ):
                kind = AmxBlockSparseAttention
            blocks = kind(queries, source, first + begin, slopes, rows)
            outputs.append(blocks.attend(epsilon))
            reaches.append(blocks.reach)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), reaches
