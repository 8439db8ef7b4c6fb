"""Parts of a projection: torch's own split is the reference."""

from __future__ import annotations

import torch

from alibi_lm import kernels
from alibi_lm.model.attention.qkv_split import joined, split
from tests.unit.kernels.needs_amx import needs_amx


def test_parts_of_one_tensor_are_joined_without_a_copy() -> None:
    whole = torch.randn(2, 5, 24)
    parts = whole.split([12, 4, 8], dim=-1)
    result = joined(parts)
    assert result is not None
    assert torch.equal(result, whole)
    assert result.data_ptr() == whole.data_ptr()


def test_what_does_not_lie_side_by_side_is_not_joined() -> None:
    whole = torch.randn(2, 5, 24)
    first, second, third = whole.split([12, 4, 8], dim=-1)
    assert joined([first, third, second]) is None  # another order
    assert joined([first, third]) is None  # a gap
    assert joined([first, second]) is None  # rows of something wider
    assert joined([first, second.clone(), third]) is None
    assert joined([first.float(), second.double()]) is None
    assert joined([whole[:, :0, :12], second, third]) is None
    assert joined([x.expand(2, 5, 1) for x in torch.randn(3, 1, 1, 1)]) is None


def test_gradients_equal_those_of_torchs_split() -> None:
    values, widths = torch.randn(3, 7, 8), [4, 2, 2]
    gradients: list[torch.Tensor] = []
    for way in (split, torch.split):
        leaf = values.clone().requires_grad_()
        parts = way(leaf * 1.0, widths, **({"dim": -1} if way is torch.split else {}))
        losses = [(part.sin() * (index + 1)).sum() for index, part in enumerate(parts)]
        gradients += torch.autograd.grad(losses, leaf)
    assert torch.equal(*gradients)


@needs_amx
def test_gradients_of_the_compiled_attention_are_joined() -> None:
    backend = kernels.backend()
    assert backend is not None
    assert backend.unavailable_reason() is None
    parts = torch.randn(2, 300, 64).bfloat16().split([32, 16, 16], dim=-1)
    heads = [x.unflatten(-1, (-1, 16)).transpose(1, 2).requires_grad_() for x in parts]
    output = backend.attention(heads[0], heads[1], heads[2], (0.5, 0.25), None)
    found = torch.autograd.grad(output.float().square().sum(), heads)
    whole = joined([x.transpose(1, 2).flatten(2) for x in found])
    assert whole is not None
    assert whole.is_contiguous()
    assert whole.data_ptr() == found[0].data_ptr()


def test_a_part_that_is_not_used_has_a_gradient_of_zero() -> None:
    leaf = torch.randn(2, 6, requires_grad=True)
    first, _ = split(leaf * 1.0, [4, 2])
    first.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1, 1, 1, 1, 0, 0]] * 2
