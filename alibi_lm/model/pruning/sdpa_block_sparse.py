"""Training attention that reads as far as `reach` proves necessary, forward and backward.

Queries go in blocks of `BLOCK`. Each block reads its own keys causally and, for each head, the keys
before it back to where the bound of `reach` lets it start. Heads that reach alike and blocks that
follow each other go through the fused kernel in one call, the blocks as its batch; parts are merged
by their log-sum-exp as in `flash`, and the backward pass gives each part the merged output and
log-sum-exp. So what is computed, forward and backward, is attention over the keys that were kept.

What that is worth, for every input: let P be a row's probabilities over all keys, P' those over the
keys it kept, and p <= epsilon the probability of what it left out. Kept keys have P' = P/(1 - p),
the others P' = 0, so that |P - P'|_1 = 2p, and

    |o - o'| <= 2 epsilon max|v|.

Let g be the gradient of the row's output, a_j = g.v_j, R = max_j a_j - min_j a_j <= 2 |g| max|v|
over the row's keys, and dS_j = P_j (a_j - sum_l P_l a_l) the gradient of its scores. No |P - P'| is
above p, and sum P'a and sum Pa differ by at most p R. Then, in dS' - dS, a kept key has
(P'_j - P_j)(a_j - sum P'a) + P_j (sum Pa - sum P'a) and one left out has -dS_j, so that no entry is
above 2 p R and their absolute sum is at most 3 p R. With dS and dS' summing to 0, for any center c
of the keys and the sums over the rows i that see key j, of all query heads that share it,

    |dq_i - dq'_i| <= 3 epsilon R_i max|k - c| / sqrt(D)
    |dk_j - dk'_j| <= 2 epsilon sum_i R_i |q_i| / sqrt(D)
    |dv_j - dv'_j| <= epsilon sum_i |g_i|

beside rounding like the dense path's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alibi_lm.model.attention.sdpa_cpu import (
    key_bias,
    merge_part,
    sdpa_cpu_backward,
    sdpa_cpu_forward,
)
from alibi_lm.model.pruning.block_bounds import first_key_per_block

BLOCK = 1024
"""Query rows of a block; below 768 the kernel works in smaller tiles, at twice the cost of a pair
of query and key."""
LEAST_QUERIES = 6 * BLOCK
"""Shorter sequences are read densely, and no norm is taken: what could be left out of them costs
about as much as it saves."""
WORTH = 0.6
"""Horizons are used where they read at most this share of the dense path's pairs of query and key;
a pair costs more there."""
GROUP_TOLERANCE = 1.25
"""Heads, and neighboring blocks, go together whose longest reach is at most this many times the
shortest."""
GRID = 64
"""Reading starts at multiples of this many keys."""
MOST_BLOCKS = 16
"""Blocks of one call at most: their keys are copied side by side."""


@dataclass(frozen=True)
class BlockGroup:
    """One call of the kernel: some heads of some blocks of equal size, a window of keys each."""

    heads: tuple[int, ...]
    first: int
    """First row of the first block, of the queries."""
    size: int
    """Rows of a block."""
    count: int
    """Number of blocks, one after another."""
    key: int
    """First key of the first block's window; those of the others follow at steps of `size`."""
    length: int
    """Keys of a window."""
    to_end: int
    """From the first key of a window to behind its block's last row."""
    causal: bool
    """Whether the window is the block's own keys."""

    @property
    def rows(self) -> slice:
        """All rows of the piece."""
        return slice(self.first, self.first + self.count * self.size)

    @property
    def pairs(self) -> float:
        """Pairs of query and key that it reads."""
        read = len(self.heads) * self.count * self.size * self.length
        return read / 2 if self.causal else read

    def windows(self) -> Iterator[slice]:
        """The keys of each block."""
        for index in range(self.count):
            key = self.key + index * self.size
            yield slice(key, key + self.length)


def plan_block_groups(
    q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float
) -> list[BlockGroup] | None:
    """What to read so that each row leaves out at most `epsilon`, or None where all is read.

    It follows from q and k alone, so that activations computed again are the same.

    Args:
        q: [B, H, Tq, D] on the CPU; the queries are the last Tq of the Tk positions.
        k: [B, KV, Tk, D].
        slopes: of the H heads.
        epsilon: from 0 (read everything) to below 1.

    Returns:
        Pieces, the blocks' own keys first.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if epsilon <= 0 or min(slopes) <= 0 or num_queries < LEAST_QUERIES:
        return None
    offset = num_keys - num_queries
    begins = torch.arange(offset, num_keys, BLOCK)
    starts = first_key_per_block(q, k, slopes, epsilon, BLOCK).amin(dim=0)
    reaches = begins - starts
    reaches = torch.minimum(-(-reaches // GRID) * GRID, begins)
    plan = [*_own(len(slopes), num_queries, offset), *_far(reaches, num_queries, offset)]
    dense = len(slopes) * num_queries * (offset + num_queries / 2)
    return plan if sum(piece.pairs for piece in plan) <= WORTH * dense else None


def block_sparse_sdpa(
    q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], plan: list[BlockGroup]
) -> Tensor:
    """Attention over the keys of a plan: see `attention.attention` for the arguments.

    Returns:
        [B, H, Tq, D], whose memory lies as [B, Tq, H, D].
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    output: Tensor = _BlockSparseSdpa.apply(q, k, v, slopes, plan)
    return output


def _own(num_heads: int, num_queries: int, offset: int) -> Iterator[BlockGroup]:
    whole = num_queries // BLOCK
    for first, size, count in ((0, BLOCK, whole), (whole * BLOCK, num_queries % BLOCK, 1)):
        if size:
            heads = tuple(range(num_heads))
            yield BlockGroup(heads, first, size, count, offset + first, size, size, True)


def _far(reaches: Tensor, num_queries: int, offset: int) -> Iterator[BlockGroup]:
    """Pieces of the keys before the blocks, reaches [H, blocks] of them."""
    totals = reaches.sum(dim=1)
    order = totals.argsort().tolist()
    start = 0
    for stop in range(1, len(order) + 1):
        alike = stop < len(order) and int(totals[order[stop]]) <= GROUP_TOLERANCE * int(
            totals[order[start]]
        )
        if alike:
            continue
        heads = sorted(order[start:stop])
        for first, count, reach in _runs(reaches[heads].amax(dim=0).tolist(), offset):
            row = first * BLOCK
            size = min(BLOCK, num_queries - row)
            key = offset + row - reach
            yield BlockGroup(tuple(heads), row, size, count, key, reach, reach + size, False)
        start = stop


def _runs(reaches: list[int], offset: int) -> Iterator[tuple[int, int, int]]:
    """Neighboring blocks (first, count, keys) that reach alike; the last block is alone."""
    first = 0
    while first < len(reaches):
        stop, longest, shortest = first + 1, reaches[first], reaches[first]
        while stop < len(reaches) - 1 and stop - first < MOST_BLOCKS:
            longer, less = max(longest, reaches[stop]), min(shortest, reaches[stop])
            if longer > GROUP_TOLERANCE * less or longer > offset + first * BLOCK:
                break
            stop, longest, shortest = stop + 1, longer, less
        if longest:
            yield first, stop - first, longest
        first = stop


class _BlockSparseSdpa(torch.autograd.Function):
    """The kernel over a plan's pieces, and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], plan: list[BlockGroup]
    ) -> Tensor:
        shape = (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        output = q.new_empty(shape, dtype=torch.float32).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for piece in plan:
            keys, values = (_key_windows(x, piece, q.shape[1]) for x in (k, v))
            part, part_lse = sdpa_cpu_forward(
                _blocks(q, piece), keys, values, 0.0, piece.causal, attn_mask=_bias(slopes, piece)
            )
            _merge(output, lse, _unblocked(part, piece), _unblocked(part_lse, piece), piece)
        output = output.to(q.dtype)
        ctx.slopes, ctx.plan = slopes, plan
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, output, lse = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        # Sums over pieces are fp32, rounded once at the end.
        dq = output.new_zeros(output.transpose(1, 2).shape, dtype=torch.float32).transpose(1, 2)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        group = q.shape[1] // k.shape[1]
        for piece in ctx.plan:
            keys, values = (_key_windows(x, piece, q.shape[1]) for x in (k, v))
            queries, upstream, mixed = (_blocks(x, piece) for x in (q, grad, output))
            part_q, part_k, part_v = sdpa_cpu_backward(
                upstream,
                queries,
                keys,
                values,
                mixed,
                _blocks(lse.unsqueeze(-1), piece).squeeze(-1),
                0.0,
                piece.causal,
                attn_mask=_bias(ctx.slopes, piece),
            )
            _add(dq[:, :, piece.rows], _unblocked(part_q, piece), piece.heads)
            shared = tuple(head // group for head in piece.heads)
            for total, part in ((dk, part_k), (dv, part_v)):
                parts = part.unflatten(0, (-1, piece.count)).unbind(1)
                for window, one in zip(piece.windows(), parts, strict=True):
                    _add(total[:, :, window], one, shared)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _follow(heads: tuple[int, ...]) -> bool:
    return heads == tuple(range(heads[0], heads[0] + len(heads)))


def _pick(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Some heads (dimension 1), a view where they follow each other."""
    if _follow(heads):
        return x[:, heads[0] : heads[0] + len(heads)]
    return x[:, list(heads)]


def _blocks(x: Tensor, piece: BlockGroup) -> Tensor:
    """The piece's rows of x [B, H, Tq, ...] as [B * count, heads, size, ...]."""
    rows = _pick(x, piece.heads)[:, :, piece.rows]
    return rows.unflatten(2, (piece.count, piece.size)).transpose(1, 2).flatten(0, 1)


def _unblocked(part: Tensor, piece: BlockGroup) -> Tensor:
    """[B * count, heads, size, ...] as [B, heads, rows, ...]."""
    return part.unflatten(0, (-1, piece.count)).transpose(1, 2).flatten(2, 3)


def _key_windows(x: Tensor, piece: BlockGroup, num_heads: int) -> Tensor:
    """Each block's keys or values of x [B, KV, Tk, D], one for each query head of the piece."""
    group = num_heads // x.shape[1]
    stop = piece.key + (piece.count - 1) * piece.size + piece.length
    # Shared heads are repeated: the kernel's backward pass would add them up in 16 bits.
    chosen = _pick(x, tuple(head // group for head in piece.heads))[:, :, piece.key : stop]
    return chosen.unfold(2, piece.length, piece.size).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _bias(slopes: tuple[float, ...], piece: BlockGroup) -> Tensor:
    """m(j - z) with z the last row of each block, [1, heads, 1, length]."""
    bias = key_bias(slopes, piece.to_end, torch.float32)
    assert bias is not None
    return _pick(bias, piece.heads)[..., : piece.length]


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, piece: BlockGroup) -> None:
    """Put a part's rows into the output; further parts by their log-sum-exp."""
    if piece.causal:
        output[:, :, piece.rows], lse[:, :, piece.rows] = part, part_lse
        return
    heads = list(piece.heads)
    # Copies, since the heads are a list.
    own, total = output[:, heads, piece.rows], lse[:, heads, piece.rows]
    merge_part(own, total, part, part_lse)
    output[:, heads, piece.rows], lse[:, heads, piece.rows] = own, total


def _add(total: Tensor, part: Tensor, heads: tuple[int, ...]) -> None:
    """Add [B, heads, n, D] to those heads of [B, H, n, D], where a head may come up again."""
    if _follow(heads):
        total[:, heads[0] : heads[0] + len(heads)] += part
    else:
        total.index_add_(1, torch.tensor(heads), part.float())
