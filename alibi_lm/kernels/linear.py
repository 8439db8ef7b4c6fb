"""Linear layers whose bf16 weight gradients on the CPU run at the speed of other products.

torch's product with a transposed first operand runs at half speed or less there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alibi_lm.kernels import backend_for


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with the same results and the same gradients up to the order of sums.

    Under torch.compile it is `F.linear`: a product that the compiler sees.
    """
    if (
        torch.compiler.is_compiling()
        or not (weight.requires_grad and torch.is_grad_enabled())
        or values.dtype != weight.dtype
        or torch.is_autocast_enabled("cpu")
        or backend_for(values) is None
    ):
        return F.linear(values, weight, bias)
    return _Linear.apply(values, weight, bias)


def weight_gradient(gradient: Tensor, values: Tensor) -> Tensor:
    """gradient^T values [M, K] of gradient [N, M] and values [N, K]."""
    if gradient.dtype == values.dtype and (backend := backend_for(values)):
        result = values.new_empty(gradient.shape[1], values.shape[1])
        if backend.weight_gradient(gradient, values, result):
            return result
    return gradient.t() @ values


def add_weight_gradient(total: Tensor, gradient: Tensor, values: Tensor) -> bool:
    """Add gradient^T values to the fp32 total [M, K] without rounding; False where it cannot."""
    backend = backend_for(values) if gradient.dtype == values.dtype else None
    return backend is not None and backend.weight_gradient(gradient, values, total)


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
