"""Inputs of pruned training attention: what is planned for them, and what that drops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from alibi_lm.model.pruning.bounds import first_key_per_block
from alibi_lm.model.slopes import alibi_slopes

WIDTH = 16
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """One sequence: q [H, Tq, D] of the last Tq positions, k, v [KV, Tk, D], and the gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    slopes: tuple[float, ...]

    def to(self, dtype: torch.dtype) -> Case:
        q, k, v, grad = (x.to(dtype) for x in (self.q, self.k, self.v, self.grad))
        return Case(q, k, v, grad, self.slopes)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(length: int, heads: int = 4, kv_heads: int = 4, cached: int = 0) -> Case:
    q, grad = (noise(n, heads, length - cached, WIDTH) for n in (1, 2))
    k, v = (noise(n, kv_heads, length, WIDTH) for n in (3, 4))
    return Case(q, k, v, grad, alibi_slopes(heads))


def trained_like(length: int) -> Case:
    """Keys share a large part, some tokens have much larger norms; key heads are shared."""
    case = plain(length, heads=6, kv_heads=2)
    case.k.mul_(torch.exp(0.5 * noise(5, 1, length, 1))).add_(2 * noise(6, 2, 1, WIDTH))
    case.q.mul_(1.5).add_(noise(7, 6, 1, WIDTH))
    return case


def huge_distant_key(length: int) -> Case:
    """One key of the start that late queries of some heads cannot do without."""
    case = plain(length)
    case.k[:, 5] = 40 * case.q[:, -7]
    case.v[:, 5] = 50
    return case


def equal_scores(length: int) -> Case:
    case = plain(length)
    case.q.zero_()
    return case


def late_loud_query(length: int) -> Case:
    """Small norms first, then queries a hundred times larger."""
    case = plain(length)
    case.q.mul_(0.3)
    case.q[:, -3:] *= 100
    return case


def loud_gradients(length: int) -> Case:
    case = plain(length, heads=3, kv_heads=1, cached=length // 8 + 13)
    case.grad[:, ::50] *= 1000
    case.v[:, ::30] *= 30
    return case


KINDS: dict[str, Callable[[int], Case]] = {
    "plain": plain,
    "trained": trained_like,
    "huge distant key": huge_distant_key,
    "equal scores": equal_scores,
    "late loud query": late_loud_query,
    "loud gradients": loud_gradients,
}


def first_keys(case: Case, epsilon: float, block: int) -> Tensor:
    """[H, blocks]."""
    slopes = torch.tensor(case.slopes, dtype=torch.float64)
    return first_key_per_block(case.q[None], case.k[None], slopes, epsilon, block)[0]


def dropped_mass(case: Case, starts: Tensor, block: int) -> float:
    """The largest probability, in float64, that a row has before where its block starts."""
    group = case.q.shape[0] // case.k.shape[0]
    offset = case.k.shape[1] - case.q.shape[1]
    positions = torch.arange(offset, case.k.shape[1])
    distances = positions[:, None] - torch.arange(case.k.shape[1])
    worst = 0.0
    for head, slope in enumerate(case.slopes):
        scores = case.q[head].double() @ case.k[head // group].double().T / math.sqrt(WIDTH)
        scores = (scores - slope * distances).masked_fill(distances < 0, -math.inf)
        before = (
            torch.arange(case.k.shape[1])
            < starts[head].repeat_interleave(block)[: len(positions), None]
        )
        worst = max(worst, (scores.softmax(dim=1) * before).sum(dim=1).max().item())
    return worst


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences of parts whose queries, keys and directions differ by orders of magnitude."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    num_keys = draw(st.integers(200, 900))
    num_queries = draw(st.sampled_from([1, 130, num_keys]))
    q = noise(draw(st.integers(0, 99)), heads, num_keys, WIDTH)
    k = noise(draw(st.integers(100, 199)), kv_heads, num_keys, WIDTH)
    shared = noise(201, 1, 1, WIDTH)
    for x in (q, k):
        mixed = draw(st.floats(0, 1))
        x.copy_((1 - mixed) * x + mixed * shared)
        for _ in range(draw(st.integers(1, 4))):
            first = draw(st.integers(0, num_keys - 1))
            stop = draw(st.integers(first, num_keys)) if draw(st.booleans()) else first + 1
            x[:, first:stop] *= 10 ** draw(st.floats(-3, 2)) * draw(st.sampled_from([1, -1]))
    slopes = draw(st.sampled_from([alibi_slopes(heads), (0.03,) * heads, (1e-4,) * heads]))
    q = q[:, num_keys - min(num_queries, num_keys) :]
    return Case(q, k, k, q, slopes).to(draw(st.sampled_from(DTYPES)))
