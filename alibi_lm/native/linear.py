"""Linear layers in bf16 on the CPU, whose weight gradients run at the speed of other products.

A product with a transposed first operand runs at half speed or less in torch's library, so the
output's gradient is transposed first, a panel at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alibi_lm.native.build import unavailable

PANEL_VALUES = 1 << 22
"""Values of a transposed panel: 8 MiB, which stay in cache and are not asked of the system anew."""
SMALLEST = 256
"""Rows and widths below which a transpose gains nothing."""


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with the same results and the same gradients up to the order of sums."""
    if not (
        weight.requires_grad
        and torch.is_grad_enabled()
        and values.dtype == weight.dtype == torch.bfloat16
        and values.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and unavailable() is None
    ):
        return F.linear(values, weight, bias)
    return _Linear.apply(values, weight, bias)


def weight_gradient(gradient: Tensor, values: Tensor) -> Tensor:
    """gradient^T values [M, K] of gradient [N, M] and values [N, K]."""
    rows, width = gradient.shape
    if not (
        min(rows, width, values.shape[1]) >= SMALLEST
        and gradient.dtype == torch.bfloat16
        and gradient.device.type == "cpu"
        and gradient.stride(1) == 1
        and unavailable() is None
    ):
        return gradient.t() @ values
    panel = max(SMALLEST, PANEL_VALUES // rows)
    result = values.new_empty(width, values.shape[1])
    transposed = gradient.new_empty(min(panel, width), rows)
    for first in range(0, width, panel):
        end = min(first + panel, width)
        part = transposed[: end - first]
        torch.ops.alibi_lm.transpose(gradient[:, first:end], part)
        torch.mm(part, values, out=result[first:end])
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        return F.linear(values, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        values, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        d_values = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_values = (flat @ weight).view_as(values)
        if ctx.needs_input_grad[1]:
            d_weight = weight_gradient(flat, values.reshape(-1, values.shape[-1]))
        if ctx.needs_input_grad[2]:
            d_bias = flat.sum(0)
        return d_values, d_weight, d_bias
