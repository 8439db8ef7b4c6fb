"""Attention with linear biases and the loss in C++, for CPUs with AMX.

It is compiled on the machine that runs it, on first use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alibi_lm.kernels import register
from alibi_lm.kernels.amx import attention as amx_attention
from alibi_lm.kernels.amx import build

SMALLEST_GRADIENT = 256
"""Rows and widths below which packing a weight gradient's operands gains nothing."""
LANES = 16
"""The values' width must be a multiple of this."""


class AmxBackend:
    """The `Backend` of this package."""

    block = amx_attention.BLOCK
    attention_unsupported_reason = staticmethod(amx_attention.unsupported_reason)
    attention = staticmethod(amx_attention.attention)
    attention_with_logsumexp = staticmethod(amx_attention.attention_with_logsumexp)
    first_key_per_block = staticmethod(amx_attention.first_key_per_block)

    def unavailable_reason(self) -> str | None:
        """Why its C++ cannot be compiled or loaded here, or None."""
        return build.unavailable_reason()

    def weight_gradient(self, gradient: Tensor, values: Tensor, out: Tensor) -> bool:
        """See `Backend.weight_gradient`."""
        if (
            min(*gradient.shape, values.shape[1]) < SMALLEST_GRADIENT
            or values.shape[1] % LANES
            or not gradient.stride(1) == values.stride(1) == 1
        ):
            return False
        torch.ops.alibi_lm.weight_gradient(gradient, values, out)
        return True

    def loss_forward(self, logits: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
        """See `Backend.loss_forward`."""
        return torch.ops.alibi_lm.loss_forward(logits, targets, losses)

    def loss_backward(
        self, logits: Tensor, targets: Tensor, logsumexp: Tensor, factors: Tensor, out: Tensor
    ) -> None:
        """See `Backend.loss_backward`."""
        torch.ops.alibi_lm.loss_backward(logits, targets, logsumexp, factors, out)


if build.has_instructions():
    register(AmxBackend())
