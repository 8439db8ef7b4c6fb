"""The certificate: dropped keys never matter more than epsilon allows, for any input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.pruning import block_sparse
from alibi_lm.model.pruning.block_sparse import BlockSpans
from alibi_lm.model.pruning.bounds import GRID, KeyNormBound, prior_attention_span, upper_norms
from alibi_lm.model.slopes import alibi_slopes
from tests.unit.model.pruning.driver import pruned_sequence

EPSILONS = [1e-3, 1e-6, 1e-9]
DTYPES = [torch.float32, torch.bfloat16]
WIDTH = 16


@dataclass
class Problem:
    """One sequence: q [H, Tq, D] of the last Tq positions, k and v [KV, Tk, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: tuple[float, ...]

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.slopes)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(length: int, heads: int = 8, kv_heads: int = 8, seed: int = 0) -> Problem:
    q, k, v = (noise(seed + n, h, length, WIDTH) for n, h in enumerate((heads, kv_heads, kv_heads)))
    return Problem(q, k, v, alibi_slopes(heads))


def trained_like(length: int) -> Problem:
    """Keys share a large part, and some tokens have much larger norms than others."""
    problem = plain(length, seed=10)
    size = torch.exp(0.5 * noise(20, 1, length, 1))
    k = problem.k * size * 1.5 + 3 * noise(21, 8, 1, WIDTH)
    return Problem(problem.q * 1.5 + noise(22, 8, 1, WIDTH), k, problem.v, problem.slopes)


def large_norms(length: int) -> Problem:
    problem = plain(length, seed=30)
    return Problem(problem.q * 6, problem.k * 6, problem.v, problem.slopes)


def huge_distant_key(length: int) -> Problem:
    """One key of the start that late queries of some heads cannot do without."""
    problem = plain(length, seed=40)
    problem.k[:, 5] = 60 * problem.q[:, -7]
    problem.v[:, 5] = 50
    return problem


def equal_scores(length: int) -> Problem:
    problem = plain(length, seed=50)
    return Problem(torch.zeros_like(problem.q), problem.k, problem.v, problem.slopes)


def late_loud_query(length: int) -> Problem:
    """Small norms first, then queries a hundred times larger."""
    problem = plain(length, seed=60)
    problem.q[:, :] *= 0.3
    problem.q[:, -3:] *= 100
    return problem


KINDS: dict[str, Callable[[int], Problem]] = {
    "random": plain,
    "trained": trained_like,
    "large norms": large_norms,
    "huge distant key": huge_distant_key,
    "equal scores": equal_scores,
    "late loud query": late_loud_query,
}


def reference(problem: Problem, rows: list[int]) -> Tensor:
    """Dense attention of some of the rows in float64, [H, rows, D]."""
    group = problem.q.shape[0] // problem.k.shape[0]
    num_keys = problem.k.shape[1]
    positions = torch.tensor(rows) + num_keys - problem.q.shape[1]
    distances = positions[:, None] - torch.arange(num_keys)
    outputs = []
    for head, slope in enumerate(problem.slopes):
        key, value = problem.k[head // group].double(), problem.v[head // group].double()
        scores = problem.q[head, rows].double() @ key.T / math.sqrt(problem.q.shape[-1])
        scores = (scores - slope * distances).masked_fill(distances < 0, -math.inf)
        outputs.append(scores.softmax(dim=-1) @ value)
    return torch.stack(outputs)


def dropped_mass(problem: Problem, spans: list[BlockSpans]) -> float:
    """The largest probability, in float64, that any row and head did not read."""
    group = problem.q.shape[0] // problem.k.shape[0]
    offset = problem.k.shape[1] - problem.q.shape[1]
    worst = 0.0
    for span in spans:
        ends = [*span.first[1:], 2 * span.first[-1] - span.first[0] + 1]
        size = ends[0] - span.first[0] if len(span.first) > 1 else block_sparse.BLOCK
        for block, first in enumerate(span.first):
            stop = min(first + size, problem.k.shape[1])
            distances = torch.arange(first, stop)[:, None] - torch.arange(stop)
            for head, slope in enumerate(problem.slopes):
                begin = first - int(span.keys[head, block])
                if begin == 0:
                    continue
                q = problem.q[head, first - offset : stop - offset].double()
                scores = q @ problem.k[head // group, :stop].double().T / math.sqrt(q.shape[-1])
                scores = (scores - slope * distances).masked_fill(distances < 0, -math.inf)
                mass = scores.softmax(dim=-1)[:, :begin].sum(dim=-1).max().item()
                worst = max(worst, mass)
    return worst


def run(problem: Problem, epsilon: float, spans: list[BlockSpans] | None = None) -> Tensor:
    output, read = pruned_sequence(problem.q, problem.k, problem.v, problem.slopes, epsilon)
    if spans is not None:
        spans += read
    return output


DRAWS = 64
"""One row's rounding errors may be small by luck, and with large norms one row's are all that
count: where the dense path's own seem too small, they are those of as many inputs, which differ a
little in the queries and in the signs of the values."""


def check(
    problem: Problem, epsilons: list[float], rows: list[int] | None = None
) -> list[list[BlockSpans]]:
    """The certificate: 2 epsilon max|v|, plus twice what the dense path errs in this precision."""
    rows = list(range(problem.q.shape[1])) if rows is None else rows
    expected = reference(problem, rows)
    own = dense_error(problem, rows, expected)
    return [check_one(problem, epsilon, rows, expected, own) for epsilon in epsilons]


def dense_error(problem: Problem, rows: list[int], expected: Tensor) -> float:
    parts = (problem.q[None], problem.k[None], problem.v[None])
    dense = attention(*parts, slopes=problem.slopes)[0, :, rows].double()
    return (dense - expected).abs().max().item()


def check_one(
    problem: Problem, epsilon: float, rows: list[int], expected: Tensor, own: float
) -> list[BlockSpans]:
    spans: list[BlockSpans] = []
    error = (run(problem, epsilon, spans)[:, rows].double() - expected).abs().max().item()
    # A vector's norm: largest over tokens, as the bound is of |o - o'|.
    largest = problem.v.double().norm(dim=-1).max().item()
    if error > 2 * epsilon * largest + 2 * own:
        own = max(dense_error(other, rows, reference(other, rows)) for other in redrawn(problem))
    assert error <= 2 * epsilon * largest + 2 * own, f"{error} of {largest}, dense {own}"
    return spans


def redrawn(problem: Problem) -> Iterator[Problem]:
    for seed in range(DRAWS):
        signs = noise(300 + seed, *problem.v.shape[:2], 1).sign().to(problem.v.dtype)
        q = problem.q * (1 + seed / (10 * DRAWS))
        yield Problem(q, problem.k, problem.v * signs, problem.slopes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_certificate(kind: str, dtype: torch.dtype) -> None:
    problem = KINDS[kind](1500).to(dtype)
    read = []
    for epsilon, spans in zip(EPSILONS, check(problem, EPSILONS), strict=True):
        assert dropped_mass(problem, spans) <= epsilon
        read.append(sum(int(span.keys.sum()) for span in spans))
    assert read == sorted(read)


@pytest.mark.slow
@pytest.mark.parametrize("length", [16384, 131072])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_certificate_at_length(kind: str, length: int, dtype: torch.dtype) -> None:
    rows = [*range(0, length, length // 24), *range(length - 16, length)]
    check(KINDS[kind](length).to(dtype), EPSILONS, rows)


def tight(epsilon: float) -> Problem:
    """Distant keys that are exactly what the bound allows for, from where it drops them."""
    slopes, length = (1 / 16,), 4096

    def planted(boundary: int) -> Problem:
        direction = torch.ones(1, 1, WIDTH)
        k = torch.zeros(1, length, WIDTH)
        k[:, :boundary] = 5 * direction
        v = -torch.ones(1, length, WIDTH)
        v[:, :boundary] = 1
        return Problem(direction.expand(1, length, WIDTH).clone(), k, v, slopes)

    # How far before its own start a block reads, then a boundary where some block starts to read.
    spans: list[BlockSpans] = []
    run(planted(1024), epsilon, spans)
    block = next(n for n, first in enumerate(spans[0].first) if first >= 2048)
    begin = spans[0].first[block] - int(spans[0].keys[0, block])
    assert 0 < begin < 2048
    return planted(begin + GRID)


def test_a_span_one_step_too_short_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tight(1e-3)
    assert dropped_mass(problem, check(problem, [1e-3])[0]) <= 1e-3
    enough = block_sparse.first_key_from_logsumexp

    def too_short(*arguments: Tensor) -> Tensor:
        begin, local = enough(*arguments), arguments[4]  # type: ignore[arg-type]
        return torch.where(begin > 0, torch.minimum(begin + GRID, local), begin)

    monkeypatch.setattr(block_sparse, "first_key_from_logsumexp", too_short)
    with pytest.raises(AssertionError, match="dense"):
        check(problem, [1e-3])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Sequences of parts whose queries, keys and directions differ by orders of magnitude."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    num_keys = draw(st.integers(300, 1500))
    num_queries = draw(st.sampled_from([1, 5, 130, num_keys]))
    exponents = st.floats(-3, 2)
    q = noise(draw(st.integers(0, 99)), heads, num_keys, WIDTH)
    k = noise(draw(st.integers(100, 199)), kv_heads, num_keys, WIDTH)
    v = noise(200, kv_heads, num_keys, WIDTH)
    shared = noise(201, 1, 1, WIDTH)
    for x in (q, k):
        mixed = draw(st.floats(0, 1))
        x.copy_((1 - mixed) * x + mixed * shared)
        for _ in range(draw(st.integers(1, 4))):
            first = draw(st.integers(0, num_keys - 1))
            stop = draw(st.integers(first, num_keys)) if draw(st.booleans()) else first + 1
            x[:, first:stop] *= 10 ** draw(exponents) * draw(st.sampled_from([1, -1]))
    slopes = draw(st.sampled_from([alibi_slopes(heads), (0.03,) * heads, (1e-4,) * heads]))
    dtype = draw(st.sampled_from(DTYPES))
    return Problem(q[:, num_keys - num_queries :], k, v, slopes).to(dtype)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([0.3, *EPSILONS]))
def test_nothing_breaks_the_certificate(problem: Problem, epsilon: float) -> None:
    assert dropped_mass(problem, check(problem, [epsilon])[0]) <= epsilon


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(problems(), st.sampled_from([0.3, *EPSILONS]))
def test_nothing_breaks_the_certificate_in_many_tries(problem: Problem, epsilon: float) -> None:
    assert dropped_mass(problem, check(problem, [epsilon])[0]) <= epsilon


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(-40, 38), st.integers(1, 64))
def test_norms_are_never_too_small(seed: int, exponent: int, width: int) -> None:
    x = noise(seed, 50, width) * 10.0**exponent
    true = x.double().norm(dim=-1)
    assert (upper_norms(x).double() >= true).all()
    if -12 < exponent < 15:
        assert (upper_norms(x).double() <= true * (1 + 1e-4)).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 99))
def test_radii_hold_all_keys_before_a_position(sizes: list[int], seed: int) -> None:
    keys = noise(seed, 2, sum(sizes), 4) * torch.linspace(0.1, 3, sum(sizes)).unsqueeze(-1)
    ball = KeyNormBound(keys[:, : sizes[0]])
    for part in keys.split(sizes, dim=1):
        ball.add(part)
    offsets = (keys - ball.center.unsqueeze(1)).double().norm(dim=-1)
    for position in {0, 1, 63, 64, 65, sum(sizes) // 2, sum(sizes)}:
        if position > sum(sizes):
            continue
        radius = ball.radii(torch.tensor([position]), torch.tensor([0, 1]))
        true = offsets[:, :position].amax(dim=1) if position else torch.zeros(2)
        assert (radius >= true).all()
        if position % GRID == 0:
            assert torch.allclose(radius.double(), true.double(), rtol=1e-4, atol=1e-12)


def test_what_is_not_finite_is_read_by_everyone_after_it() -> None:
    problem = plain(1500, heads=2, kv_heads=2)
    problem.k[:, 2 * block_sparse.BLOCK] = math.nan
    out = run(problem, 1e-3)
    assert not out[:, 2 * block_sparse.BLOCK :].isfinite().any()
    assert out[:, : 2 * block_sparse.BLOCK].isfinite().all()


def test_prior_attention_span_is_the_published_example() -> None:
    assert prior_attention_span(10, 1 / 2, 1e-6) == 68
    assert prior_attention_span(10, 1 / 256, 1e-6) == 8657
