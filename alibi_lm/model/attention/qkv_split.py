"""Splitting a projection into q, k and v without copying their gradients in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def split(values: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`values.split(widths, dim=-1)`, without a copy in the backward pass where possible.

    If the parts' gradients already lie side by side in memory, as those of compiled CPU attention
    do, that memory is the gradient of `values`; torch's own split concatenates copies.
    """
    if (
        torch.compiler.is_compiling()
        or values.device.type != "cpu"
        or not torch.is_grad_enabled()
        or not values.requires_grad
    ):
        return values.split(list(widths), dim=-1)
    return _Split.apply(values, tuple(widths))


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these parts are the split of along the last dimension, or None."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        if (
            part.dtype != first.dtype
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.shape[:-1] != first.shape[:-1]
            or part.storage_offset() != offset
        ):
            return None
        offset += part.shape[-1]
    width = offset - first.storage_offset()
    # Larger strides mean parts of a wider tensor, smaller ones overlapping rows.
    strides, expected = first.stride(), 1
    for size, stride in zip((*first.shape[:-1], width)[::-1], strides[::-1], strict=True):
        if stride != expected:
            return None
        expected *= size
    return first.as_strided((*first.shape[:-1], width), strides)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return values.split(list(widths), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = joined(gradients)
        return torch.cat(gradients, dim=-1) if whole is None else whole, None
