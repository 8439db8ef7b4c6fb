"""Pruned training attention: output and gradients stay within the bound of `bounds`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from alibi_lm import kernels
from alibi_lm.model.attention import dispatch as table
from alibi_lm.model.attention import flex
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import set_pruning_tolerance
from alibi_lm.model.pruning import block_sparse
from alibi_lm.model.pruning.bounds import first_key_per_block
from tests.unit.model.pruning.training_cases import (
    KINDS,
    WIDTH,
    Case,
    cases,
    dropped_mass,
    first_keys,
    plain,
)

# "masked" is plain masked attention in float64: what the bound itself allows, on any machine.
KERNELS = [
    ("masked", torch.float64),
    ("flex", torch.float32),
    ("flex", torch.bfloat16),
    ("amx", torch.bfloat16),
]
BLOCK = flex.BLOCK


@dataclass
class Exact:
    """Dense results in float64, and the bounds of `bounds` without epsilon."""

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


def masked(case: Case, leaves: list[Tensor], epsilon: float) -> Tensor:
    """Attention over the keys from each block's first key on, head by head."""
    q, k, v = (x[0] for x in leaves)
    num_queries, num_keys = q.shape[1], k.shape[1]
    keys = torch.arange(num_keys)
    distances = torch.arange(num_keys - num_queries, num_keys)[:, None] - keys
    starts = torch.zeros(len(q), num_queries)
    if epsilon:
        blocks = first_keys(case, epsilon, BLOCK) // BLOCK * BLOCK
        starts = blocks.repeat_interleave(BLOCK, dim=1)[:, :num_queries]
    outputs = []
    for head, slope in enumerate(case.slopes):
        kv = head * k.shape[0] // q.shape[0]
        scores = q[head] @ k[kv].T / math.sqrt(WIDTH) - slope * distances
        dropped = (distances < 0) | (keys < starts[head, :, None])
        outputs.append(scores.masked_fill(dropped, -math.inf).softmax(dim=1) @ v[kv])
    return torch.stack(outputs)[None]


def results(case: Case, epsilon: float, kernel: str) -> list[Tensor]:
    leaves = [x[None].clone().requires_grad_() for x in (case.q, case.k, case.v)]
    if kernel == "masked":
        output = masked(case, leaves, epsilon)
    elif kernel == "flex":
        output = flex.attention(leaves[0], leaves[1], leaves[2], case.slopes, None, epsilon)
    else:
        output = table.attention(*leaves, slopes=case.slopes, epsilon=epsilon, kernel=kernel)
    return [x[0].double() for x in (output, *torch.autograd.grad(output, leaves, case.grad[None]))]


def check(case: Case, *epsilons: float, kernel: str, parts: range = range(4)) -> None:
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


@pytest.fixture(autouse=True)
def flex_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients on the CPU; its formula for them runs there all the same."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


@pytest.fixture
def short_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths at which short inputs are pruned."""
    monkeypatch.setattr(flex, "MIN_PRUNED_QUERIES", 600)
    monkeypatch.setattr(block_sparse, "AMX_MIN_QUERIES", 600)
    monkeypatch.setattr(block_sparse, "AMX_MIN_PRUNED_SHARE", 0.0)


def backend() -> kernels.Backend:
    """The compiled CPU kernels, after `skip_without`."""
    registered = kernels.backend()
    assert registered is not None
    return registered


def skip_without(kernel: str) -> None:
    """Skip where this CPU has no such kernel."""
    if kernel == "amx" and (reason := kernels.unavailable_reason()):
        pytest.skip(reason)


def starts_of(case: Case, epsilon: float, kernel: str) -> Tensor:
    """The starts that the kernel's executor is given, [H, blocks]."""
    if kernel != "amx":
        return first_keys(case, epsilon, BLOCK) // BLOCK * BLOCK
    q, k = case.q[None], case.k[None]
    starts = block_sparse.training_starts(backend(), q, k, case.slopes, epsilon)
    assert starts is not None
    return starts[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("short_inputs")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_keep_their_bounds(kind: str, kernel: str, dtype: torch.dtype) -> None:
    skip_without(kernel)
    case = KINDS[kind](1100).to(dtype)
    assert kind == "equal scores" or (starts_of(case, 1e-2, kernel) > 0).any()
    check(case, 1e-2, 1e-6, kernel=kernel)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("kernel", "dtype"), [KERNELS[0], KERNELS[1], KERNELS[3]])
def test_blocks_as_shipped(kernel: str, dtype: torch.dtype) -> None:
    skip_without(kernel)
    case = plain(4096, heads=1, kv_heads=1).to(dtype)
    case.slopes = (0.2,)
    assert (starts_of(case, 1e-6, kernel)[..., -1] > 0).any()
    check(case, 1e-6, kernel=kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "dtype"), [KERNELS[0], KERNELS[3]])
@pytest.mark.parametrize("length", [6144, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_at_length(kind: str, length: int, kernel: str, dtype: torch.dtype) -> None:
    skip_without(kernel)
    case = KINDS[kind](length).to(dtype)
    check(case, 1e-3, 1e-6, kernel=kernel)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.3, 1e-3, 1e-9]), st.sampled_from([64, 100, 256]))
def test_nothing_breaks_the_bound(case: Case, epsilon: float, block: int) -> None:
    starts = first_keys(case, epsilon, block)
    assert (starts >= 0).all()
    assert dropped_mass(case, starts, block) <= epsilon


def tight(monkeypatch: pytest.MonkeyPatch, excess: int) -> Case:
    """Distant keys with all the probability that the bound allows for, up to `excess` keys after
    where a block starts; and from now on blocks start there."""
    slopes, length, row = (1 / 16,), 1536, 768

    def planted(boundary: int) -> Case:
        direction = torch.ones(1, 1, WIDTH)
        k = torch.zeros(1, length, WIDTH)
        k[:, :boundary] = 5.4 * direction
        v = -torch.ones(1, length, WIDTH)
        v[:, :boundary] = 1
        same = direction.expand(1, length, WIDTH).clone()
        # Only the row that the block's bound is about: sums over rows would hide it.
        grad = torch.zeros_like(same)
        grad[:, row] = 1
        return Case(same, k, v, grad, slopes)

    begin = int(first_keys(planted(512), 1e-3, BLOCK)[0, row // BLOCK]) // BLOCK * BLOCK
    assert 0 < begin < row

    def too_late(*arguments: object) -> Tensor:
        starts = first_key_per_block(*arguments)  # type: ignore[arg-type]
        return torch.where(starts > 0, starts + excess, starts)

    case = planted(begin + excess)
    monkeypatch.setattr(flex, "first_key_per_block", too_late)
    monkeypatch.setattr(
        sys.modules[__name__],
        "first_keys",
        lambda case, epsilon, block: too_late(
            case.q[None], case.k[None], torch.tensor(case.slopes), epsilon, block
        )[0],
    )
    return case


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("short_inputs")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS[:2])
@pytest.mark.parametrize("part", range(4))
def test_a_start_too_late_is_detected(
    part: int, kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = range(part, part + 1)
    with monkeypatch.context() as patch:
        check(tight(patch, 0).to(dtype), 1e-3, kernel=kernel, parts=parts)
    with pytest.raises(AssertionError, match="of what is allowed"):
        check(tight(monkeypatch, BLOCK).to(dtype), 1e-3, kernel=kernel, parts=parts)


def test_kernels_that_do_not_prune_read_everything() -> None:
    case = plain(2000)
    for dense, ours in zip(
        results(case, 0.0, "sdpa_cpu"), results(case, 1e-3, "sdpa_cpu"), strict=True
    ):
        assert torch.equal(dense, ours)
    parts = (case.q[None], case.k[None], case.v[None])
    slopes = torch.tensor(case.slopes)
    assert flex.MIN_PRUNED_QUERIES > 2000
    whole, short = (flex.block_mask(*parts[:2], slopes, None, epsilon) for epsilon in (0.0, 1e-3))
    assert short is whole
    for epsilon in (-1e-6, 1.0, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            table.attention(*parts, slopes=case.slopes, epsilon=epsilon)


def test_everything_is_read_after_what_is_not_finite() -> None:
    case = plain(1000)
    case.k[1, 300] = math.nan
    starts = first_keys(case, 1e-3, 100)
    assert (starts[1] == 0).all()
    assert (starts[0] > 0).any()


def test_a_head_whose_slope_is_not_positive_reads_everything() -> None:
    case = plain(1000)
    case.slopes = (0.5, 0.0, -0.1, 0.25)
    starts = first_keys(case, 1e-3, 100)
    assert (starts[1:3] == 0).all()
    assert (starts[[0, 3], -1] > 0).all()


def test_starts_are_each_heads_own() -> None:
    """So a rank that holds some heads reads as far as one that holds all."""
    case = plain(1500, heads=6, kv_heads=6)
    part = Case(case.q[2:4], case.k[2:4], case.v[2:4], case.grad[2:4], case.slopes[2:4])
    assert torch.equal(first_keys(case, 1e-6, 256)[2:4], first_keys(part, 1e-6, 256))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("short_inputs")
def test_a_model_in_training_and_its_recomputed_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_the_cpu = {**vars(table.KERNELS["flex"]), "devices": None, "missing": None}
    monkeypatch.setitem(table.KERNELS, "flex", table.AttentionKernel(**on_the_cpu))
    model = Decoder(ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=50))
    tokens = torch.randint(50, (2, 1201), generator=torch.Generator().manual_seed(1))

    def gradients(epsilon: float, recompute: bool) -> list[Tensor]:
        set_pruning_tolerance(model, epsilon)
        model.activation_checkpointing = recompute
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    dense, ours, recomputed = gradients(0, False), gradients(1e-2, False), gradients(1e-2, True)
    assert all(torch.equal(a, b) for a, b in zip(ours, recomputed, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(dense, ours, strict=True))
    for right, near in zip(dense, ours, strict=True):
        assert (right - near).norm() <= 1e-2 * cast(float, right.norm().clamp(min=1e-3))
    model.eval()
    assert torch.equal(gradients(0, False)[0], gradients(1e-2, False)[0])
