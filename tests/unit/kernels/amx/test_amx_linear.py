"""Linear layers and the loss in bf16 against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from alibi_lm.kernels.linear import add_weight_gradient, linear, weight_gradient
from alibi_lm.model.cross_entropy import IGNORED, linear_cross_entropy
from tests.unit.kernels.needs_amx import needs_amx

pytestmark = needs_amx


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("rows", "out", "width"),
    [(512, 700, 304), (300, 256, 272), (257, 1030, 512), (2000, 256, 1040), (2, 3, 4)],
)
def test_weight_gradient(rows: int, out: int, width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = torch.randn(rows, out + 8).bfloat16()
        values = torch.randn(rows, width).bfloat16()
        for gradient in (wide[:, 8:], wide[:, :out].contiguous()):
            exact = gradient.double().t() @ values.double()
            scale = exact.abs().max()
            got = weight_gradient(gradient, values)
            assert (got.double() - exact).abs().max() <= 2**-8 * scale
            total = torch.full((out, width), 0.5)
            assert add_weight_gradient(total, gradient, values) == (rows > 2)
            if rows > 2:  # nothing is rounded to bf16 on the way
                assert (total.double() - 0.5 - exact).abs().max() <= 1e-5 * scale
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_gives_what_torchs_gives(bias: bool) -> None:
    values = torch.randn(2, 300, 280).bfloat16()
    weight, offset = torch.randn(260, 280).bfloat16(), torch.randn(260).bfloat16()
    grad = torch.randn(2, 300, 260).bfloat16()
    results = []
    for function in (linear, F.linear):
        leaves = [x.clone().requires_grad_() for x in (values, weight, offset)]
        output = function(leaves[0], leaves[1], leaves[2] if bias else None)
        output.backward(grad)
        results.append([output, *(_gradient(x) for x in leaves[: 3 if bias else 2])])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).abs().max() <= 2**-7 * theirs.double().abs().max()
    assert torch.equal(results[0][0], results[1][0])


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def test_loss_and_gradients_of_large_and_uneven_logits() -> None:
    """A vocabulary that is no multiple of a vector, logits far from 0, ignored targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = (30 * torch.randn(70, 48, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(1003, 48, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 1003, (70,), generator=generator)
    targets[5], targets[6], targets[7] = IGNORED, 1002, 0
    losses = linear_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(losses.sum(), (hidden, weight))
    # The kernel is given logits rounded to bf16: so is the exact loss.
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    rounded = logits + (F.linear(hidden, weight).detach().double() - logits.detach())
    exact = F.cross_entropy(rounded, targets, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)
    assert losses[5] == 0
    for ours, right in zip(got, torch.autograd.grad(exact.sum(), wide), strict=True):
        assert (ours.double() - right).abs().max() <= 5e-3 * right.abs().max()


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    hidden, weight = torch.randn(2, 16).bfloat16(), torch.randn(10, 16).bfloat16()
    for target in (10, -1):
        with pytest.raises(IndexError, match="out of bounds"):
            linear_cross_entropy(hidden, weight, torch.tensor([0, target]))
