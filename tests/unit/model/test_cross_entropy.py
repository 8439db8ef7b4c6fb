"""The output layer's cross entropy against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.model import cross_entropy
from alibi_lm.model.cross_entropy import linear_cross_entropy


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 32, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(700, 32, generator=generator) / 2).to(dtype).requires_grad_()
    targets = torch.randint(0, 700, (300,), generator=generator)
    targets[::50] = cross_entropy.IGNORED
    return hidden, weight, targets, torch.rand(300, generator=generator)


@pytest.fixture(
    params=[
        (1 << 24, 512, 1 << 20, 1 << 28),
        (1, 64, 5000, 1 << 28),
        (1, 64, 5000, 1),
        (1, 1, 1, 1),
    ]
)
def _portions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOGITS_AT_ONCE", "ROWS_AT_ONCE", "SOFTMAX_AT_ONCE", "LOGITS_KEPT")
    for name, value in zip(names, request.param, strict=True):
        monkeypatch.setattr(cross_entropy, name, value)


@pytest.mark.usefixtures("_portions")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]
)
def test_losses_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets, grad = inputs(dtype)
    losses = linear_cross_entropy(hidden, weight, targets)
    assert losses.dtype == torch.float32
    got = [losses, *torch.autograd.grad(losses, (hidden, weight), grad)]
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="none")
    right = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for ours, expected in zip(got, right, strict=True):
        assert (ours.double() - expected).norm() <= tolerance * expected.norm()
    assert (losses[targets == cross_entropy.IGNORED] == 0).all()
    assert (got[1][targets == cross_entropy.IGNORED] == 0).all()


@pytest.mark.usefixtures("_portions")
def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, targets, grad = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, targets)
        gradients = torch.autograd.grad(losses, (hidden, weight), grad)
    halves = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    expected = linear_cross_entropy(halves[0], halves[1], targets)
    assert torch.equal(losses, expected)
    for ours, half in zip(gradients, torch.autograd.grad(expected, halves, grad), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, half.float())


def test_a_frozen_weight_costs_no_gradient() -> None:
    hidden, weight, targets, grad = inputs(torch.float32)
    losses = linear_cross_entropy(hidden, weight.detach(), targets)
    (ours,) = torch.autograd.grad(losses, hidden, grad)
    both = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(ours, torch.autograd.grad(both, hidden, grad)[0])


def test_targets_may_be_a_column_of_a_wider_matrix() -> None:
    hidden, weight, targets, _ = (x.detach() for x in inputs(torch.bfloat16))
    column = torch.stack([targets, targets], dim=1)[:, 1:].flatten()
    assert not column.is_contiguous()
    losses = linear_cross_entropy(hidden, weight, column)
    assert torch.equal(losses, linear_cross_entropy(hidden, weight, targets))


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    targets[3] = 700
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(hidden, weight, targets)


def test_no_rows() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    losses = linear_cross_entropy(hidden[:0], weight, targets[:0])
    losses.sum().backward()
    assert losses.shape == (0,)
    assert weight.grad is not None
    assert (weight.grad == 0).all()
