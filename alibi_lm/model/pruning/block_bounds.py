"""How far back each head must read for a block of queries, before any of its scores is known.

`horizon` has the bound: with b = (q.c + |q| r)/sqrt(D), r the largest |k - c| of the keys before
the block, a row at position i gives the keys before n at most

    e^(b - lse - m(i - n + 1)) / (1 - e^(-m))

of its probability. There the log-sum-exp is that of keys already read. Here nothing has been read,
and the larger of two lower bounds stands for it, both from sums over q and k that cost as little as
norms:

- the row's score of its own key, where the bias is 0: lse >= q_i.k_i/sqrt(D);
- Jensen's inequality: for any weights w_j >= 0 of sum 1 over keys j <= i,
  log sum_j e^(s_j) >= sum_j w_j (s_j - log w_j), and sum_j w_j q_i.k_j is the product of q_i with
  one mean key. The weights fall as the bias does over the last `PAST` tiles of `TILE` keys before
  the row's own tile, and are equal within a tile.

Solving the bound for n gives, for a block of rows i and epsilon,

    n <= 1 + (ln epsilon + ln(1 - e^(-m)) - max_i (b_i - lse_i - m i)) / m.

All of it is plain tensor operations without a branch on values, so that it runs on any device.
What is rounded is moved to the safe side, as in `horizon`, and what is not finite reads everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alibi_lm.model.pruning.bounds import upper_norms

TILE = 64
PAST = 16

# Unit roundoff of fp32, doubled.
_ROUNDING = 2.0**-23
# What a kernel's exponentials and sums may err in a log-probability, and more.
_SLACK = 1e-3


@torch.no_grad()
def first_key_per_block(
    q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float, block: int
) -> Tensor:
    """Where each block of queries must start to read, over all sequences of the batch.

    Args:
        q: [B, H, Tq, D]; the queries are the last Tq of the Tk positions.
        k: [B, KV, Tk, D].
        slopes: of the H heads, all above 0.
        epsilon: probability that each row may leave out, above 0 and below 1.
        block: rows of a block; the last one may have fewer.

    Returns:
        [B, H, blocks] int64, at most the position of the block's first row.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    offset = num_keys - num_queries
    loss_gap = _scores_over_logsumexp(q, k, slopes, block)
    steepness = torch.tensor(slopes, dtype=torch.float64, device=q.device).view(-1, 1)
    rows = torch.arange(offset, num_keys, device=q.device)
    worst = _pad(loss_gap - steepness * rows, block, -math.inf).unflatten(2, (-1, block)).amax(3)
    room = math.log(epsilon) + torch.log(-torch.expm1(-steepness)) - worst
    found = 1 + torch.floor(room / steepness)
    first = torch.arange(offset, num_keys, block, device=q.device, dtype=torch.float64)
    # NaN and minus infinity both read everything; a comparison with NaN is false.
    bounded = torch.where(found > 0, torch.minimum(found, first), torch.zeros_like(found))
    return bounded.long()


def _scores_over_logsumexp(q: Tensor, k: Tensor, slopes: tuple[float, ...], block: int) -> Tensor:
    """Upper bounds, fp64 [B, H, Tq], of any earlier key's q.k/sqrt(D) less the row's log-sum-exp.

    "Earlier" is before the row's block of `block` rows.
    """
    group, (num_queries, width) = q.shape[1] // k.shape[1], q.shape[2:]
    offset = k.shape[2] - num_queries
    q, k = q.float(), k.float()

    def grouped(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1) if group > 1 else x

    center = k.mean(dim=2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    lengths = upper_norms(q).double()
    # What lies before a block, for each of its rows.
    radii = (upper_norms(k - center) * (1 + 2 * _ROUNDING)).cummax(dim=2).values
    longest = (radii[:, :, -1:] + upper_norms(center)).double()
    before = torch.arange(offset, k.shape[2], block, device=q.device)
    radius = torch.where(before > 0, radii[:, :, (before - 1).clamp(min=0)], 0.0)
    radius = radius.repeat_interleave(block, dim=2)[:, :, :num_queries]
    # Sums of products, not matrix products: those may be told to round their inputs.
    towards = (q * grouped(center)).sum(dim=3).double()
    own = (q * grouped(k[:, :, offset:])).sum(dim=3).double()
    mean, constant = _mean_keys(k, offset, slopes, group)
    tiles = _pad(q, TILE, 0.0).unflatten(2, (-1, TILE))
    jensen = (tiles * mean.unsqueeze(3)).sum(dim=4).flatten(2)[:, :, :num_queries].double()
    scale = 1 / math.sqrt(width)
    logsumexp = torch.maximum(own * scale, jensen * scale + constant[:, :num_queries])
    score = (towards + lengths * grouped(radius).double()) * scale
    # Three products of q with something no longer than a key, and the mean's own sums.
    error = (3 * (width + 8) + TILE + PAST) * _ROUNDING * lengths * grouped(longest) * scale
    return score - logsumexp + error + _SLACK


def _mean_keys(
    k: Tensor, offset: int, slopes: tuple[float, ...], group: int
) -> tuple[Tensor, Tensor]:
    """For the rows of each tile from `offset` on, one weighted mean of keys in tiles before it.

    Returns:
        The mean keys [B, H, tiles, D], fp32, and what Jensen's bound has beside the product, the
        weights' entropy less their mean bias: fp64 [H, rows], minus infinity for rows of a tile
        that has none before it.
    """
    # Tiles begin at the offset; a first one that is not full is never used.
    front = -offset % TILE
    if front:
        k = torch.cat([k.new_zeros(*k.shape[:2], front, k.shape[3]), k], dim=2)
    first = (offset + front) // TILE
    sums = _pad(k, TILE, 0.0).unflatten(2, (-1, TILE)).mean(dim=3)
    # Tile t sees tiles t - PAST to t - 1.
    past = torch.cat([sums.new_zeros(*sums.shape[:2], PAST, sums.shape[3]), sums], dim=2)
    past = past[:, :, first:-1].unfold(2, PAST, 1)
    back = torch.arange(PAST, 0, -1, device=k.device)
    steepness = torch.tensor(slopes, dtype=torch.float64, device=k.device).view(-1, 1, 1)
    tile = torch.arange(first, sums.shape[2], device=k.device).unsqueeze(1) - back
    unseen = tile < (1 if front else 0)
    weights = (-steepness * TILE * back).masked_fill(unseen, -math.inf)
    # A row of minus infinities has no weights: 0 for all.
    weights = weights.softmax(dim=2).nan_to_num(0.0)
    entropy = -torch.special.xlogy(weights, weights).sum(dim=2) + math.log(TILE)
    entropy = entropy.masked_fill(unseen.all(dim=1), -math.inf)
    # From a tile's first row back to the middle of each tile before it.
    distance = (weights * (back * TILE - (TILE - 1) / 2)).sum(dim=2)
    within = torch.arange(TILE, device=k.device)
    constant = entropy.unsqueeze(2) - steepness * (distance.unsqueeze(2) + within)
    heads = past.repeat_interleave(group, dim=1) if group > 1 else past
    mean = (heads * weights.float().unsqueeze(2)).sum(dim=4)
    return mean, constant.flatten(1)


def _pad(x: Tensor, multiple: int, value: float) -> Tensor:
    """x with dimension 2 made up to a multiple."""
    missing = -x.shape[2] % multiple
    if not missing:
        return x
    filler = x.new_full((*x.shape[:2], missing, *x.shape[3:]), value)
    return torch.cat([x, filler], dim=2)
