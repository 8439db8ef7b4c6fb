"""Certified horizons of ALiBi attention: what a query provably need not read.

One head with slope m > 0, a query at position i and the scores s_j = q_i.k_j/sqrt(D) - m(i - j)
of the keys j <= i. Softmax does not change when the same number is taken from all scores of a
row, so q.k may be read as q.c + q.(k - c) for any fixed center c. With r(n) the largest |k_j - c|
of the keys j < n, every key that lies before n has

    s_j <= b - m(i - j),    b = (q_i.c + |q_i| r(n)) / sqrt(D),

and the sum of their weights is at most that of a geometric series,

    sum_{j < n} e^(s_j) <= e^(b - m(i - n + 1)) (1 - e^(-m n)) / (1 - e^(-m)).

A row's log-sum-exp over keys near to it is a lower bound of that over all of its keys. So the share
of the row's probability that lies before n is at most

    e^(b - lse_near - m(i - n + 1)) (1 - e^(-m n)) / (1 - e^(-m)),

which falls as n falls, and n = 0 leaves nothing out. The largest n (on a grid) at which this is at
most epsilon for every row of a query block is where the block starts to read. The output o' of
what is read, normalized, and the output o of all keys are o = (1 - p) o' + p f with p <= epsilon
the share that is left out and f a mean of values: |o - o'| = p |f - o'| <= 2 epsilon max|v|.

No step assumes anything of q and k: where norms are large the bound is weak and more is read. What
is computed in floating point is moved to the safe side: norms and q.c up, the log-sum-exp down, by
bounds of their rounding (with fp32 products in full precision, as is torch's default). A number
that is not finite reads everything.

`prior_attention_span` is the bound before any score is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_EPSILON = 1e-6
GRID = 64
"""Reading starts at multiples of this many keys."""

# Unit roundoff of fp32, doubled: all sums below are of fp32 products, and their error bounds are
# first order.
_ROUNDING = 2.0**-23
# Elements below 2^-63 may vanish when they are squared in fp32.
_VANISHED = 2.0**-62
# What a fused kernel's exponential and sum may err in a log-sum-exp, and more.
_KERNEL_SLACK = 1e-4


def prior_attention_span(largest_score: float, slope: float, epsilon: float) -> int:
    """A distance from which on a head loses at most `epsilon`, from |q.k|/sqrt(D) <= U alone.

    Near and far keys share the weights e^(-m d), so of N keys those at distance D and more have at
    most e^(2U) sum_{d >= D} e^(-m d) / sum_d e^(-m d) <= e^(2U - m D) of the probability.
    """
    return math.ceil((2 * largest_score - math.log(epsilon)) / slope)


def upper_norms(x: Tensor) -> Tensor:
    """Norms over the last dimension, fp32, never below the true ones."""
    width = x.shape[-1]
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norms * (1 + (width + 8) * _ROUNDING) + math.sqrt(width) * _VANISHED


class KeyNormBound:
    """The ball around a fixed center that the keys before a position lie in, for each key head.

    Attributes:
        center: [KV, D] fp32.
        center_norm: [KV] fp32, an upper bound of the center's norm.
        length: number of keys seen.
    """

    def __init__(self, keys: Tensor) -> None:
        """Take the center from `keys` [KV, n, D], which are not added yet: any center is right."""
        self.center = keys.float().mean(dim=1).nan_to_num(0.0, 0.0, 0.0)
        self.center_norm = upper_norms(self.center)
        self.length = 0
        # Column n is of the keys before n * GRID; the last one may still grow.
        self._radii = keys.new_zeros(keys.shape[0], 1, dtype=torch.float32)
        self._count = 1

    def add(self, keys: Tensor) -> None:
        """Add the next keys [KV, n, D]."""
        if keys.shape[1] == 0:
            return
        offsets = upper_norms(keys.float() - self.center.unsqueeze(1)) * (1 + 2 * _ROUNDING)
        start, stop = self.length, self.length + keys.shape[1]
        first, last = start // GRID + 1, (stop - 1) // GRID + 1
        padded = offsets.new_zeros(keys.shape[0], (last - first + 1) * GRID)
        place = start - (first - 1) * GRID
        padded[:, place : place + keys.shape[1]] = offsets
        blocks = padded.unflatten(1, (-1, GRID)).amax(dim=2)
        self._reserve(last + 1)
        if first < self._count:
            blocks[:, 0] = torch.maximum(blocks[:, 0], self._radii[:, first])
        blocks[:, 0] = torch.maximum(blocks[:, 0], self._radii[:, first - 1])
        # NaN stays: cummax and maximum hand it on.
        self._radii[:, first : last + 1] = blocks.cummax(dim=1).values
        self._count, self.length = last + 1, stop

    def truncate(self, length: int) -> None:
        """Forget keys from `length` on; what is left may still count some of them."""
        self.length = length
        self._count = min(self._count, (length + GRID - 1) // GRID + 1)

    def radii(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Upper bounds of |k - c| over the keys before `positions`, of key heads `heads`.

        Both are int64 and broadcast; no position is beyond `length`.
        """
        return self._radii[heads, (positions + GRID - 1) // GRID]

    def _reserve(self, count: int) -> None:
        if count > self._radii.shape[1]:
            grown = self._radii.new_zeros(
                self._radii.shape[0], max(count, 2 * self._radii.shape[1])
            )
            grown[:, : self._count] = self._radii[:, : self._count]
            self._radii = grown


@dataclass(frozen=True)
class Rows:
    """What the bound needs of query rows: [H, n] fp64 each."""

    towards: Tensor
    """Upper bound of q.c / sqrt(D)."""
    norm: Tensor
    """Upper bound of |q| / sqrt(D)."""
    heads: Tensor
    """[H] int64: each query head's key head."""
    slopes: Tensor
    """[H] fp64."""


def query_rows(q: Tensor, ball: KeyNormBound, slopes: tuple[float, ...]) -> Rows:
    """What the bound needs of queries [H, n, D]."""
    heads = torch.arange(q.shape[0], device=q.device) // (q.shape[0] // ball.center.shape[0])
    width = q.shape[-1]
    scale = 1 / math.sqrt(width)
    norm = upper_norms(q).double() * (scale * (1 + _ROUNDING))
    # Not a matrix product: those may be told to round their inputs.
    towards = (q.float() * ball.center[heads].unsqueeze(1)).sum(dim=-1).double() * scale
    error = (width + 8) * _ROUNDING * norm * ball.center_norm[heads].double().unsqueeze(1)
    steepness = torch.tensor(slopes, dtype=torch.float64, device=q.device)
    return Rows(towards + error, norm, heads, steepness)


def lower_logsumexp(
    rows: Rows, ball: KeyNormBound, logsumexp: Tensor, span: int, width: int
) -> Tensor:
    """A lower bound, fp64 [H, n], of log-sum-exps that a kernel computed in fp32.

    Args:
        rows: the rows.
        ball: of at least the keys that were read.
        logsumexp: [H, n].
        span: largest distance, in keys, of a bias from its zero.
        width: D.
    """
    computed = logsumexp.double()
    everything = torch.full_like(rows.heads, ball.length)
    largest = (ball.radii(everything, rows.heads) + ball.center_norm[rows.heads]).double()
    slack = (width + 8) * _ROUNDING * rows.norm * largest.unsqueeze(1)
    slack = slack + _ROUNDING * (rows.slopes.unsqueeze(1) * span + computed.abs()) + _KERNEL_SLACK
    return computed - slack


def log_far_mass(
    rows: Rows, ball: KeyNormBound, lower_lse: Tensor, positions: Tensor, before: Tensor
) -> Tensor:
    """Log of an upper bound of the rows' probability on keys before `before`: the formula above.

    Args:
        rows: [H, ..., n] rows, their last dimension those of one block.
        ball: of at least those keys.
        lower_lse: lower bounds of the rows' log-sum-exps, shaped as the rows.
        positions: [..., n] int64, the rows' own positions.
        before: [H, ...] int64.

    Returns:
        [H, ...] fp64, the largest over the rows of a block; -inf where `before` is 0.
    """
    shape = (-1, *[1] * (before.ndim - 1))
    slopes = rows.slopes.view(shape)
    radius = ball.radii(before, rows.heads.view(shape)).double()
    scores = rows.towards + rows.norm * radius.unsqueeze(-1) - lower_lse
    distances = (positions - before.unsqueeze(-1) + 1).double()
    worst = (scores - slopes.unsqueeze(-1) * distances).amax(dim=-1)
    count = torch.log(-torch.expm1(-slopes * before.double())) - torch.log(-torch.expm1(-slopes))
    # NaN (a score that is not finite) must not pass for "little": it stays NaN.
    return torch.where(before == 0, -math.inf, worst + count)


def starts(
    rows: Rows,
    ball: KeyNormBound,
    lower_lse: Tensor,
    positions: Tensor,
    near: Tensor,
    epsilon: float,
) -> Tensor:
    """Where each block must start to read: near - n * GRID for the smallest n that is enough.

    Args:
        rows, ball, lower_lse, positions: as for `log_far_mass`, rows [H, blocks, n].
        near: [blocks] int64: the rows of a block have read all keys from here on.
        epsilon: the probability that may be left out.

    Returns:
        [H, blocks] int64, from 0 to `near`.
    """
    limit = math.log(epsilon)
    most = (int(near.max()) + GRID - 1) // GRID
    shape = (rows.slopes.shape[0], near.shape[0])
    # `high` is always enough; `low` is the least that has not been ruled out.
    low = torch.zeros(shape, dtype=torch.int64, device=near.device)
    high = torch.full_like(low, most)
    for _ in range(most.bit_length() + 1):
        middle = (low + high) // 2
        before = (near - middle * GRID).clamp(min=0)
        enough = log_far_mass(rows, ball, lower_lse, positions, before) <= limit
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, torch.minimum(middle + 1, high))
    return (near - high * GRID).clamp(min=0)
