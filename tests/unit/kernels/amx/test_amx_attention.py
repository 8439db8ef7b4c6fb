"""The compiled attention kernel against the paper's formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from alibi_lm.kernels.amx.attention import MIN_QUERIES
from alibi_lm.model.attention.dispatch import KERNELS, attention
from alibi_lm.model.slopes import alibi_slopes
from tests.unit.kernels.needs_amx import needs_amx

pytestmark = needs_amx

# batch, heads, key/value heads, queries, keys, head width, window
CASES = [
    (1, 8, 8, 512, 512, 32, None),
    (2, 12, 12, 129, 129, 64, None),
    (1, 3, 3, 577, 577, 40, None),
    (1, 6, 2, 257, 700, 64, None),
    (2, 40, 1, 65, 65, 16, None),
    (1, 5, 5, 300, 300, 96, 2),
    (1, 4, 2, 700, 700, 32, 100),
    (1, 7, 7, 330, 900, 130, 256),
    (1, 2, 1, 1500, 1500, 256, None),
    (3, 14, 7, 64, 64, 2, 63),
]


def inputs(case: tuple[Any, ...], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, num_queries, num_keys, width = case[:6]
    generator = torch.Generator().manual_seed(num_keys * 1009 + num_queries)
    joint = torch.randn(batch, num_keys, heads + 2 * kv_heads, width, generator=generator)
    q, k, v = (joint * scale).bfloat16().transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    grad = torch.randn(batch, num_queries, heads, width, generator=generator).bfloat16()
    return q[:, :, num_keys - num_queries :], k, v, grad.transpose(1, 2)


def exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, slopes: tuple[float, ...], window: int | None
) -> list[Tensor]:
    """Output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
    offset = k.shape[2] - q.shape[2]
    distance = torch.arange(offset, k.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = leaves[0] @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores - torch.tensor(slopes, dtype=torch.float64).view(-1, 1, 1) * distance
    unseen = (distance < 0) | (distance >= (window or k.shape[2]))
    output = scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ values
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


def ours(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, slopes: tuple[float, ...], window: int | None
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves, slopes=slopes, window=window, kernel="amx")
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def worst(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """The largest error of each, relative to its largest value."""
    return [float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(found, right, strict=True)]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: tuple[Any, ...]) -> None:
    tensors, slopes, window = inputs(case), alibi_slopes(case[1]), case[6]
    found, right = ours(*tensors, slopes, window), exact(*tensors, slopes, window)
    assert max(worst(found, right)) < 8e-3
    if window is None:  # another slope for each head would show
        wrong = exact(*tensors, tuple(m * 1.1 for m in slopes), window)
        assert max(worst(found, wrong)) > 2 * max(worst(found, right))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_no_further_off_than_torchs_kernel(scale: float) -> None:
    tensors, slopes = inputs((2, 8, 8, 600, 600, 64), scale), alibi_slopes(8)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    output = attention(*leaves, slopes=slopes, kernel="sdpa_cpu")
    theirs = [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]
    mine = ours(*tensors, slopes, None)
    for right, own, other in zip(exact(*tensors, slopes, None), mine, theirs, strict=True):
        assert (own.double() - right).norm() < 1.02 * (other.double() - right).norm()


def test_far_positions_are_as_exact_as_near_ones() -> None:
    """The last queries of 70,000 positions, for whom a bias from position 0 on would be coarse."""
    case = (1, 2, 2, 600, 70_000, 32, None)
    q, k, v, grad = inputs(case)
    slopes = (0.5, 2.0**-8)
    found = attention(q, k, v, slopes=slopes, kernel="amx")
    near = 20_000  # e^-77 at the flattest slope
    right = exact(q, k[:, :, -near:], v[:, :, -near:], grad, slopes, None)[0]
    assert worst([found], [right])[0] < 5e-3


def test_no_slopes_is_plain_causal_attention() -> None:
    q, k, v, _ = inputs((1, 8, 4, 300, 300, 64))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    found = attention(q, k, v, slopes=None, kernel="amx")
    assert worst([found], [expected])[0] < 4e-3


@pytest.mark.parametrize("first", [0, 1, 63, 64, 65, 250, 300])
def test_starts_leave_out_keys_before_them_and_no_other(first: int) -> None:
    """A start is rounded down to a block of 64 keys; what lies before has no influence at all."""
    q, k, v, grad = inputs((1, 2, 1, 130, 430, 32))
    slopes = (0.01, 0.0)
    starts = torch.full((1, 2, 3), first, dtype=torch.int32)
    kept = first // 64 * 64
    forward, backward = torch.ops.alibi_lm.attention_forward, torch.ops.alibi_lm.attention_backward
    output, logsumexp = forward(q, k, v, slopes, 0, starts)
    found = [output, *backward(grad, q, k, v, output, logsumexp, slopes, 0, starts)]
    right = exact(q, k[:, :, kept:], v[:, :, kept:], grad, slopes, None)
    found[2], found[3] = found[2][:, :, kept:], found[3][:, :, kept:]
    assert max(worst(found, right)) < 8e-3
    assert all(not x[:, :, :kept].any() for x in backward(
        grad, q, k, v, output, logsumexp, slopes, 0, starts)[1:])  # fmt: skip


def test_the_number_of_threads_changes_no_bit() -> None:
    tensors, slopes = inputs((2, 6, 3, 400, 400, 32)), alibi_slopes(6)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ours(*tensors, slopes, None))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    q, k, v, _ = inputs((1, 4, 4, 200, 200, 16))
    k = k.clone()
    k[0, 1, 100, 3] = value
    found = attention(q, k, v, slopes=alibi_slopes(4), kernel="amx")
    assert found[0, 1, 100:].isnan().any()
    assert found[0, 1, :100].isfinite().all()
    assert found[0, [0, 2, 3]].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    tensors, slopes = inputs((1, 4, 4, 150, 150, 64), scale=40.0), alibi_slopes(4)
    found, right = ours(*tensors, slopes, None), exact(*tensors, slopes, None)
    assert all(x.isfinite().all() for x in found)
    assert worst(found, right)[0] < 1e-2


def test_what_it_cannot_do_goes_to_another_kernel() -> None:
    kernel = KERNELS["amx"]
    assert kernel.tensors_unsupported_reason is not None
    wide = torch.zeros(1, 64, 64, 16, dtype=torch.bfloat16)
    odd = torch.zeros(1, 64, 64, 15, dtype=torch.bfloat16)
    few = wide[:, :, : MIN_QUERIES - 1]
    assert kernel.tensors_unsupported_reason(wide, wide, wide) is None
    assert kernel.tensors_unsupported_reason(odd, odd, odd) == "a head width of 15"
    assert kernel.tensors_unsupported_reason(few, wide, wide) == "as few queries as 15"
    with pytest.raises(ValueError, match="amx does not support a head width of 15"):
        attention(odd, odd, odd, slopes=None, kernel="amx")
    assert attention(odd, odd, odd, slopes=None).shape == odd.shape
