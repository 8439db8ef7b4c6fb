"""Training attention by horizons: its output and gradients are as near to dense ones as it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alibi_lm import kernels
from alibi_lm.model.attention import dispatch as table
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import set_pruning_tolerance
from alibi_lm.model.pruning import sdpa_block_sparse
from alibi_lm.model.pruning.block_bounds import first_key_per_block
from alibi_lm.model.pruning.sdpa_block_sparse import GRID, plan_block_groups
from alibi_lm.model.slopes import alibi_slopes

DTYPES = [torch.float32, torch.bfloat16]
KERNELS = [("sdpa_cpu", torch.float32), ("sdpa_cpu", torch.bfloat16),
           ("amx", torch.bfloat16)]  # fmt: skip
WIDTH = 16


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


def huge_far_key(length: int) -> Case:
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
    "huge far key": huge_far_key,
    "equal scores": equal_scores,
    "late loud query": late_loud_query,
    "loud gradients": loud_gradients,
}


@dataclass
class Exact:
    """Dense results in float64, and the bounds of `flash_horizon` without epsilon."""

    values: list[Tensor]
    """The output and the gradients of q, k and v."""
    bounds: list[Tensor]
    """What each vector of them may be off by, over epsilon."""


def exact(case: Case) -> Exact:
    """Head by head, from the formulas."""
    group = case.q.shape[0] // case.k.shape[0]
    q, k, v, grad = (x.double() for x in (case.q, case.k, case.v, case.grad))
    output, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    bound_q, bound_k, bound_v = (torch.zeros(x.shape[:2], dtype=torch.float64) for x in (q, k, v))
    positions = torch.arange(k.shape[1])[k.shape[1] - q.shape[1] :, None]
    distances = positions - torch.arange(k.shape[1])
    unseen, scale = distances < 0, 1 / math.sqrt(WIDTH)
    for head, slope in enumerate(case.slopes):
        key = head // group
        scores = q[head] @ k[key].T * scale - slope * distances
        weights = scores.masked_fill_(unseen, -math.inf).softmax(dim=1)
        output[head] = weights @ v[key]
        along = grad[head] @ v[key].T
        spread = along.masked_fill(unseen, -math.inf).amax(1)
        spread -= along.masked_fill(unseen, math.inf).amin(1)
        inner = weights * (along - (weights * along).sum(dim=1, keepdim=True))
        dq[head] = inner @ k[key] * scale
        dk[key] += inner.T @ q[head] * scale
        dv[key] += weights.T @ grad[head]
        radius = (k[key] - k[key].mean(dim=0)).norm(dim=1).max()
        bound_q[head] = 3 * spread * radius * scale
        seen = (~unseen).double().T
        bound_k[key] += 2 * scale * (seen @ (spread * q[head].norm(dim=1)))
        bound_v[key] += seen @ grad[head].norm(dim=1)
    bound = torch.full(q.shape[:2], 2 * v.norm(dim=2).max().item(), dtype=torch.float64)
    return Exact([output, dq, dk, dv], [bound, bound_q, bound_k, bound_v])


def results(case: Case, epsilon: float, kernel: str = "sdpa_cpu") -> list[Tensor]:
    leaves = [x[None].clone().requires_grad_() for x in (case.q, case.k, case.v)]
    output = table.attention(*leaves, slopes=case.slopes, epsilon=epsilon, kernel=kernel)
    return [x[0].double() for x in (output, *torch.autograd.grad(output, leaves, case.grad[None]))]


def check(case: Case, *epsilons: float, parts: range = range(4), kernel: str = "sdpa_cpu") -> None:
    """Errors of vectors: the bound, and twice the largest that the dense path has."""
    right, dense = exact(case), results(case, 0.0, kernel)
    for epsilon in epsilons:
        ours = results(case, epsilon, kernel)
        for part in parts:
            own = (dense[part] - right.values[part]).norm(dim=2).max()
            error = (ours[part] - right.values[part]).norm(dim=2)
            allowed = epsilon * right.bounds[part] + 2 * own
            worst = (error / allowed.clamp(min=1e-30)).max().item()
            assert worst <= 1, f"part {part}: {worst} of what is allowed"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and lengths at which short inputs have horizons."""
    monkeypatch.setattr(sdpa_block_sparse, "BLOCK", 256)
    monkeypatch.setattr(sdpa_block_sparse, "LEAST_QUERIES", 600)
    monkeypatch.setattr(sdpa_block_sparse, "WORTH", 2.0)
    monkeypatch.setattr(table, "AMX_MIN_QUERIES", 600)
    monkeypatch.setattr(table, "AMX_MIN_PRUNED_SHARE", 0.0)


def backend() -> kernels.Backend:
    """The compiled CPU kernels, after `skip_without`."""
    registered = kernels.backend()
    assert registered is not None
    return registered


def skip_without(kernel: str) -> None:
    """Skip where this CPU has no such kernel."""
    if kernel == "amx" and (reason := kernels.unavailable_reason()):
        pytest.skip(reason)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_keep_their_bounds(kind: str, kernel: str, dtype: torch.dtype) -> None:
    skip_without(kernel)
    case = KINDS[kind](1100).to(dtype)
    assert plan_block_groups(case.q[None], case.k[None], case.slopes, 1e-2)
    if kernel == "amx":
        starts = table._native_starts(case.q[None], case.k[None], case.slopes, 1e-2)
        assert starts is not None
        assert kind == "equal scores" or (starts > 0).any()
    check(case, 1e-2, 1e-6, kernel=kernel)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_blocks_as_shipped(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(kernel)
    monkeypatch.setattr(sdpa_block_sparse, "LEAST_QUERIES", 4096)
    case = plain(4096, heads=3, kv_heads=1).to(dtype)
    plan = plan_block_groups(case.q[None], case.k[None], case.slopes, 1e-6)
    assert plan
    assert sum(piece.pairs for piece in plan) <= 0.6 * 3 * 4096**2 / 2
    if kernel == "amx":
        starts = table._native_starts(case.q[None], case.k[None], case.slopes, 1e-6)
        assert starts is not None
        assert (starts[..., -1] > 0).any()
    check(case, 1e-6, kernel=kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("length", [6144, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_at_length(kind: str, length: int, kernel: str, dtype: torch.dtype) -> None:
    skip_without(kernel)
    case = KINDS[kind](length).to(dtype)
    check(case, 1e-3, 1e-6, kernel=kernel)


def far_mass(case: Case, starts: Tensor, block: int) -> float:
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


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.3, 1e-3, 1e-9]), st.sampled_from([64, 100, 256]))
def test_nothing_breaks_the_bound(case: Case, epsilon: float, block: int) -> None:
    starts = first_key_per_block(case.q[None], case.k[None], case.slopes, epsilon, block)[0]
    assert (starts >= 0).all()
    assert far_mass(case, starts, block) <= epsilon


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.3, 1e-3, 1e-9]))
def test_nothing_breaks_the_native_bound(case: Case, epsilon: float) -> None:
    skip_without("amx")
    case = case.to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, epsilon)[0]
    assert (starts >= 0).all()
    assert far_mass(case, starts, backend().block) <= epsilon


def test_native_starts_read_less_as_slopes_are_steeper_and_all_of_what_is_not_finite() -> None:
    skip_without("amx")
    case = plain(1000).to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, 1e-6)[0]
    assert (starts[:, -1].diff() <= 0).all()
    assert starts[1, -1] > 500
    assert starts[0, -1] > 800
    case.k[1, 300] = math.nan
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, 1e-6)[0]
    assert (starts[1, 5:] == 0).all()
    assert (starts[0, 5:] > 0).any()


def test_a_native_start_one_block_too_late_is_found_out() -> None:
    """Far keys that are all that the bound allows for: here it is tight."""
    skip_without("amx")
    length, slopes = 1536, (1 / 16,)
    case = Case(torch.ones(1, length, WIDTH), torch.zeros(1, length, WIDTH),
                torch.ones(1, length, WIDTH), torch.ones(1, length, WIDTH), slopes)  # fmt: skip
    case.k[:, :] = 5.0
    case.k[:, 700:] = 0.0
    case = case.to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], slopes, 1e-3)[0].long()
    assert far_mass(case, starts, backend().block) <= 1e-3
    late = torch.where(starts > 0, (starts + backend().block).clamp(max=length), starts)
    assert far_mass(case, late, backend().block) > 1e-3


def tight(monkeypatch: pytest.MonkeyPatch, short: int) -> Case:
    """Far keys that are all that the bound allows for, up to `short` behind where a block starts;
    and from now on blocks start there."""
    slopes, length = (1 / 16,), 1536

    def planted(boundary: int) -> Case:
        direction = torch.ones(1, 1, WIDTH)
        k = torch.zeros(1, length, WIDTH)
        k[:, :boundary] = 5 * direction
        v = -torch.ones(1, length, WIDTH)
        v[:, :boundary] = 1
        same = direction.expand(1, length, WIDTH).clone()
        # Only the row that the block's bound is about: sums over rows would hide it.
        grad = torch.zeros_like(same)
        grad[:, 768] = 1
        return Case(same, k, v, grad, slopes)

    case = planted(512)
    begin = int(first_key_per_block(case.q[None], case.k[None], slopes, 1e-3, 256)[0, 0, 3])
    begin = begin // GRID * GRID
    assert 0 < begin < 768

    def too_short(*arguments: object) -> Tensor:
        starts = first_key_per_block(*arguments)  # type: ignore[arg-type]
        return torch.where(starts > 0, starts + short, starts)

    monkeypatch.setattr(sdpa_block_sparse, "first_key_per_block", too_short)
    return planted(begin + short)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("part", range(4))
def test_a_horizon_too_short_is_found_out(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tight(monkeypatch, 0), 1e-3, parts=range(part, part + 1))
    with pytest.raises(AssertionError, match="of what is allowed"):
        check(tight(monkeypatch, 2 * GRID), 1e-3, parts=range(part, part + 1))


def test_short_inputs_and_epsilon_zero_are_dense_to_the_bit() -> None:
    case = plain(2000)
    for epsilon in (0.0, 1e-3):
        for dense, ours in zip(results(case, 0.0), results(case, epsilon), strict=True):
            assert torch.equal(dense, ours)
    parts = (case.q[None], case.k[None], case.v[None])
    assert plan_block_groups(*parts[:2], case.slopes, 1e-3) is None
    for epsilon in (-1e-6, 1.0, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            table.attention(*parts, slopes=case.slopes, epsilon=epsilon)


def test_what_is_not_finite_is_read_by_all() -> None:
    case = plain(1000)
    case.k[1, 300] = math.nan
    starts = first_key_per_block(case.q[None], case.k[None], case.slopes, 1e-3, 100)[0]
    assert (starts[1] == 0).all()
    assert (starts[0] > 0).any()


def test_horizons_are_each_heads_own() -> None:
    """So a rank that holds some heads reads as far as one that holds all."""
    case = plain(1500, heads=6, kv_heads=6)
    q, k = case.q[None], case.k[None]
    whole = first_key_per_block(q, k, case.slopes, 1e-6, 256)
    part = first_key_per_block(q[:, 2:4], k[:, 2:4], case.slopes[2:4], 1e-6, 256)
    assert torch.equal(whole[:, 2:4], part)


@pytest.mark.usefixtures("small_blocks")
def test_a_model_in_training_and_its_activations_computed_again() -> None:
    model = Decoder(ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=50))
    tokens = torch.randint(50, (2, 1201), generator=torch.Generator().manual_seed(1))

    def gradients(epsilon: float, again: bool) -> list[Tensor]:
        set_pruning_tolerance(model, epsilon)
        model.activation_checkpointing = again
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    dense, ours, computed_again = gradients(0, False), gradients(1e-2, False), gradients(1e-2, True)
    assert all(torch.equal(a, b) for a, b in zip(ours, computed_again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(dense, ours, strict=True))
    for right, near in zip(dense, ours, strict=True):
        assert (right - near).norm() <= 1e-2 * cast(float, right.norm().clamp(min=1e-3))
    model.eval()
    assert torch.equal(gradients(0, False)[0], gradients(1e-2, False)[0])
