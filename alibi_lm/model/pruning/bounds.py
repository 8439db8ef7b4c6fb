"""The pruning bound: which keys a query provably need not read, and what dropping them changes.

**What is dropped.** Take one head with slope m > 0, a query at position i and the scores
s_j = q_i.k_j/sqrt(D) - m(i - j) of the keys j <= i. A block of queries drops all keys before some
key n, its first key: softmax runs over the others.

**The inequality.** q.k = q.c + q.(k - c) for any center c. With r the largest |k_j - c| of the keys
j < n, each of them has

    s_j <= b - m(i - j),    b = (q_i.c + |q_i| r) / sqrt(D),

and their weights e^(s_j) sum to at most a geometric series. So for any lower bound L of the row's
log-sum-exp, the row's probability on the keys before n is

    p <= e^(b - L - m(i - n + 1)) (1 - e^(-m n)) / (1 - e^(-m)).

This falls as n falls, and n = 0 drops nothing. A block starts at the largest n at which it is at
most epsilon for each of its rows. Two functions find that n; they differ in L.

`first_key_from_logsumexp` takes L from keys that have been read: a log-sum-exp over some of a row's
keys is below that over all of them. n is searched for on a grid.

`first_key_per_block` runs before any score is known. L is the larger of two lower bounds, both from
sums over q and k that cost as little as norms:

- the row's score of its own key, where the bias is 0: L = q_i.k_i/sqrt(D);
- Jensen's inequality: for weights w_j >= 0 of sum 1 over keys j <= i,
  log sum_j e^(s_j) >= sum_j w_j (s_j - log w_j), and sum_j w_j q_i.k_j is the product of q_i with
  one mean key. The weights fall as the bias does over the last `PAST_TILES` tiles of `TILE` keys
  before the row's own tile, and are equal within a tile.

It takes r over all keys before the block, drops the factor 1 - e^(-m n) <= 1, and solves for n:

    n <= 1 + (ln epsilon + ln(1 - e^(-m)) - max_i (b_i - L_i - m i)) / m.

These are plain tensor operations without a branch on values, so they run on any device.

**The output.** Let o be a row's output over all keys and o' over those that are read. Then
o = (1 - p) o' + p f with f a mean of values, so |o - o'| = p |f - o'| and

    |o - o'| <= 2 epsilon max|v|.

**The gradients**, where the backward pass drops the same keys as the forward pass. Let P be the
row's probabilities over all keys and P' over those it reads: P' = P/(1 - p) for the latter and 0
for the others, so no |P - P'| is above p and |P - P'|_1 = 2p. Let g be the gradient of the row's
output, a_j = g.v_j, R = max_j a_j - min_j a_j <= 2 |g| max|v| over the row's keys, and
dS_j = P_j (a_j - sum_l P_l a_l) the gradient of its scores. sum P'a and sum Pa differ by at most
p R. In dS' - dS a key that is read has (P'_j - P_j)(a_j - sum P'a) + P_j (sum Pa - sum P'a) and a
dropped one has -dS_j, so no entry is above 2 p R and their absolute sum is at most 3 p R. dS and
dS' each sum to 0, so for any center c of the keys, and with sums over the rows i that see key j, of
all query heads that share it,

    |dq_i - dq'_i| <= 3 epsilon R_i max|k - c| / sqrt(D)
    |dk_j - dk'_j| <= 2 epsilon sum_i R_i |q_i| / sqrt(D)
    |dv_j - dv'_j| <= epsilon sum_i |g_i|.

**Rounding.** Nothing is assumed of q and k: where norms are large the bound is weak and more is
read. What is computed in floating point is moved to the safe side (norms and q.c up, L down) by
bounds of its rounding, with fp32 products in full precision, as is torch's default. Whatever is not
finite reads everything. The inequalities hold beside rounding errors like the dense kernel's.

`prior_attention_span` is the bound from a bound of the scores alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_EPSILON = 1e-6
GRID = 64
"""`first_key_from_logsumexp` steps back by this many keys."""
TILE = 64
PAST_TILES = 16

# Unit roundoff of fp32, doubled: all sums below are of fp32 products, and their error bounds are
# first order.
_ROUNDING = 2.0**-23
# Elements below 2^-63 may vanish when they are squared in fp32.
_VANISHED = 2.0**-62
# Error of a fused kernel's exponentials and sums in a log-sum-exp, and more.
_KERNEL_SLACK = 1e-4
# The same in a log-probability of which no part has been computed yet.
_PRIOR_SLACK = 1e-3


def prior_attention_span(largest_score: float, slope: float, epsilon: float) -> int:
    """A distance from which on a head loses at most `epsilon`, from |q.k|/sqrt(D) <= U alone.

    Local and distant keys share the weights e^(-m d), so of N keys those at distance D and more
    have at most e^(2U) sum_{d >= D} e^(-m d) / sum_d e^(-m d) <= e^(2U - m D) of the probability.
    """
    return math.ceil((2 * largest_score - math.log(epsilon)) / slope)


def upper_norms(x: Tensor) -> Tensor:
    """Norms over the last dimension, fp32, never below the true ones."""
    width = x.shape[-1]
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norms * (1 + (width + 8) * _ROUNDING) + math.sqrt(width) * _VANISHED


class KeyNormBound:
    """For each key head, the radius r around a center c of the keys before any position.

    Attributes:
        center: [KV, D] fp32.
        center_norm: [KV] fp32, an upper bound of the center's norm.
        length: number of keys added.
    """

    def __init__(self, keys: Tensor) -> None:
        """Take the center from `keys` [KV, n, D] without adding them: any center is valid."""
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
        # cummax and maximum propagate NaN.
        self._radii[:, first : last + 1] = blocks.cummax(dim=1).values
        self._count, self.length = last + 1, stop

    def truncate(self, length: int) -> None:
        """Forget keys from `length` on; the radii may still count some of them."""
        self.length = length
        self._count = min(self._count, (length + GRID - 1) // GRID + 1)

    def radii(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Upper bounds of |k - c| over the keys before `positions`, of key heads `heads`.

        Both are int64 and broadcast; no position is above `length`.
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
class QueryBounds:
    """What the bound needs of query rows."""

    center_scores: Tensor
    """[H, n] fp64, upper bounds of q.c / sqrt(D)."""
    norms: Tensor
    """[H, n] fp64, upper bounds of |q| / sqrt(D)."""
    kv_heads: Tensor
    """[H] int64: each query head's key head."""
    slopes: Tensor
    """[H] fp64."""


def query_bounds(q: Tensor, key_norms: KeyNormBound, slopes: tuple[float, ...]) -> QueryBounds:
    """What the bound needs of queries [H, n, D]."""
    heads = torch.arange(q.shape[0], device=q.device) // (q.shape[0] // key_norms.center.shape[0])
    width = q.shape[-1]
    scale = 1 / math.sqrt(width)
    norms = upper_norms(q).double() * (scale * (1 + _ROUNDING))
    # Not a matrix product: those may be configured to round their inputs.
    scores = (q.float() * key_norms.center[heads].unsqueeze(1)).sum(dim=-1).double() * scale
    error = (width + 8) * _ROUNDING * norms * key_norms.center_norm[heads].double().unsqueeze(1)
    slope_column = torch.tensor(slopes, dtype=torch.float64, device=q.device)
    return QueryBounds(scores + error, norms, heads, slope_column)


def lower_logsumexp(
    rows: QueryBounds, key_norms: KeyNormBound, logsumexp: Tensor, span: int, width: int
) -> Tensor:
    """L: a lower bound, fp64 [H, n], of log-sum-exps that a kernel computed in fp32.

    Args:
        rows: the rows.
        key_norms: of at least the keys that were read.
        logsumexp: [H, n].
        span: largest distance, in keys, of a bias from its zero.
        width: D.
    """
    computed = logsumexp.double()
    everything = torch.full_like(rows.kv_heads, key_norms.length)
    radius = key_norms.radii(everything, rows.kv_heads)
    largest = (radius + key_norms.center_norm[rows.kv_heads]).double()
    slack = (width + 8) * _ROUNDING * rows.norms * largest.unsqueeze(1)
    slack = slack + _ROUNDING * (rows.slopes.unsqueeze(1) * span + computed.abs()) + _KERNEL_SLACK
    return computed - slack


def log_dropped_mass(
    rows: QueryBounds, key_norms: KeyNormBound, lower_lse: Tensor, positions: Tensor, before: Tensor
) -> Tensor:
    """Log of the upper bound of the rows' probability p on keys before `before`.

    Args:
        rows: [H, ..., n] rows, their last dimension those of one block.
        key_norms: of at least those keys.
        lower_lse: L, shaped as the rows.
        positions: [..., n] int64, the rows' own positions.
        before: [H, ...] int64.

    Returns:
        [H, ...] fp64, the largest over the rows of a block; -inf where `before` is 0.
    """
    shape = (-1, *[1] * (before.ndim - 1))
    slopes = rows.slopes.view(shape)
    radius = key_norms.radii(before, rows.kv_heads.view(shape)).double()
    scores = rows.center_scores + rows.norms * radius.unsqueeze(-1) - lower_lse
    distances = (positions - before.unsqueeze(-1) + 1).double()
    worst = (scores - slopes.unsqueeze(-1) * distances).amax(dim=-1)
    count = torch.log(-torch.expm1(-slopes * before.double())) - torch.log(-torch.expm1(-slopes))
    # NaN (a score that is not finite) stays NaN: it must not compare as small.
    return torch.where(before == 0, -math.inf, worst + count)


def first_key_from_logsumexp(
    rows: QueryBounds,
    key_norms: KeyNormBound,
    lower_lse: Tensor,
    positions: Tensor,
    local: Tensor,
    epsilon: float,
) -> Tensor:
    """The first key of each block: local - n * GRID for the smallest n that is enough.

    Args:
        rows, key_norms, lower_lse, positions: as for `log_dropped_mass`, rows [H, blocks, n].
        local: [blocks] int64: the rows of a block have read all keys from here on.
        epsilon: the probability that may be dropped.

    Returns:
        [H, blocks] int64, from 0 to `local`.
    """
    limit = math.log(epsilon)
    most = (int(local.max()) + GRID - 1) // GRID
    shape = (rows.slopes.shape[0], local.shape[0])
    # `high` is always enough; `low` is the least that has not been ruled out.
    low = torch.zeros(shape, dtype=torch.int64, device=local.device)
    high = torch.full_like(low, most)
    for _ in range(most.bit_length() + 1):
        middle = (low + high) // 2
        before = (local - middle * GRID).clamp(min=0)
        enough = log_dropped_mass(rows, key_norms, lower_lse, positions, before) <= limit
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, torch.minimum(middle + 1, high))
    return (local - high * GRID).clamp(min=0)


@torch.no_grad()
def first_key_per_block(q: Tensor, k: Tensor, slopes: Tensor, epsilon: float, block: int) -> Tensor:
    """The first key of each block of queries, from q and k alone.

    Args:
        q: [B, H, Tq, D]; the queries are the last Tq of the Tk positions.
        k: [B, KV, Tk, D].
        slopes: [H], on the device of q; a head whose slope is not above 0 reads everything.
        epsilon: the probability that each row may drop, above 0 and below 1.
        block: rows of a block; the last one may have fewer.

    Returns:
        [B, H, blocks] int64, at most the position of the block's first row.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    offset = num_keys - num_queries
    slope_column = slopes.double().view(-1, 1)
    excess = _scores_over_logsumexp(q, k, slope_column, block)
    rows = torch.arange(offset, num_keys, device=q.device)
    worst = _pad(excess - slope_column * rows, block, -math.inf).unflatten(2, (-1, block)).amax(3)
    room = math.log(epsilon) + torch.log(-torch.expm1(-slope_column)) - worst
    solution = 1 + torch.floor(room / slope_column)
    first = torch.arange(offset, num_keys, block, device=q.device, dtype=torch.float64)
    # NaN and minus infinity both read everything: a comparison with NaN is false.
    bounded = torch.where(solution > 0, torch.minimum(solution, first), torch.zeros_like(solution))
    return bounded.long()


def _scores_over_logsumexp(q: Tensor, k: Tensor, slopes: Tensor, block: int) -> Tensor:
    """b - L: upper bounds, fp64 [B, H, Tq], over the keys before each row's block of `block`."""
    group, (num_queries, width) = q.shape[1] // k.shape[1], q.shape[2:]
    offset = k.shape[2] - num_queries
    q, k = q.float(), k.float()

    def grouped(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1) if group > 1 else x

    center = k.mean(dim=2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    lengths = upper_norms(q).double()
    # r of the keys before a block, for each of its rows.
    radii = (upper_norms(k - center) * (1 + 2 * _ROUNDING)).cummax(dim=2).values
    longest = (radii[:, :, -1:] + upper_norms(center)).double()
    before = torch.arange(offset, k.shape[2], block, device=q.device)
    radius = torch.where(before > 0, radii[:, :, (before - 1).clamp(min=0)], 0.0)
    radius = radius.repeat_interleave(block, dim=2)[:, :, :num_queries]
    # Sums of products, not matrix products: those may be configured to round their inputs.
    center_scores = (q * grouped(center)).sum(dim=3).double()
    own = (q * grouped(k[:, :, offset:])).sum(dim=3).double()
    mean, constant = _mean_keys(k, offset, slopes.unsqueeze(2), group)
    tiles = _pad(q, TILE, 0.0).unflatten(2, (-1, TILE))
    jensen = (tiles * mean.unsqueeze(3)).sum(dim=4).flatten(2)[:, :, :num_queries].double()
    scale = 1 / math.sqrt(width)
    logsumexp = torch.maximum(own * scale, jensen * scale + constant[:, :num_queries])
    score = (center_scores + lengths * grouped(radius).double()) * scale
    # Three products of q with something no longer than a key, and the mean's own sums.
    terms = 3 * (width + 8) + TILE + PAST_TILES
    error = terms * _ROUNDING * lengths * grouped(longest) * scale
    return score - logsumexp + error + _PRIOR_SLACK


def _mean_keys(k: Tensor, offset: int, slopes: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """For the rows of each tile from `offset` on, one weighted mean of keys in tiles before it.

    Returns:
        The mean keys [B, H, tiles, D], fp32, and the part of Jensen's bound that does not depend
        on q, the weights' entropy less their mean bias: fp64 [H, rows], minus infinity for rows of
        a tile without one before it.
    """
    # Tiles begin at the offset; a first one that is not full is never used.
    front = -offset % TILE
    if front:
        k = torch.cat([k.new_zeros(*k.shape[:2], front, k.shape[3]), k], dim=2)
    first = (offset + front) // TILE
    sums = _pad(k, TILE, 0.0).unflatten(2, (-1, TILE)).mean(dim=3)
    # Tile t sees tiles t - PAST_TILES to t - 1.
    past = torch.cat([sums.new_zeros(*sums.shape[:2], PAST_TILES, sums.shape[3]), sums], dim=2)
    past = past[:, :, first:-1].unfold(2, PAST_TILES, 1)
    back = torch.arange(PAST_TILES, 0, -1, device=k.device)
    tile = torch.arange(first, sums.shape[2], device=k.device).unsqueeze(1) - back
    unseen = tile < (1 if front else 0)
    weights = (-slopes * TILE * back).masked_fill(unseen, -math.inf)
    # A row of minus infinities has no weights: 0 for all.
    weights = weights.softmax(dim=2).nan_to_num(0.0)
    entropy = -torch.special.xlogy(weights, weights).sum(dim=2) + math.log(TILE)
    entropy = entropy.masked_fill(unseen.all(dim=1), -math.inf)
    # From a tile's first row back to the middle of each tile before it.
    distance = (weights * (back * TILE - (TILE - 1) / 2)).sum(dim=2)
    within = torch.arange(TILE, device=k.device)
    constant = entropy.unsqueeze(2) - slopes * (distance.unsqueeze(2) + within)
    heads = past.repeat_interleave(group, dim=1) if group > 1 else past
    mean = (heads * weights.float().unsqueeze(2)).sum(dim=4)
    return mean, constant.flatten(1)


def _pad(x: Tensor, multiple: int, value: float) -> Tensor:
    """x with dimension 2 padded to a multiple."""
    missing = -x.shape[2] % multiple
    if not missing:
        return x
    filler = x.new_full((*x.shape[:2], missing, *x.shape[3:]), value)
    return torch.cat([x, filler], dim=2)
