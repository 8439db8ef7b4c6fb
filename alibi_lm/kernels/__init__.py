"""Compiled CPU kernels, an optional backend: the rest of the library asks here and names none.

`backend_for` gives the backend that can run a tensor's operations, or None where torch's own
operations are all there is. A backend is a subpackage that calls `register` when imported on a CPU
with the instructions it needs.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class Backend(Protocol):
    """The operations of a backend. All take bf16 tensors on the CPU."""

    block: int
    """Queries of one attention block; `starts` has one entry for each."""

    def unavailable_reason(self) -> str | None:
        """Why the backend cannot run here, or None. Compiles it on the first call."""
        ...

    def attention_unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why `attention` cannot serve q [B, H, Tq, D], k and v [B, KV, Tk, D], or None."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: tuple[float, ...] | None,
        window: int | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Causal attention [B, H, Tq, D], differentiable.

        Args:
            q, k, v: see `attention_unsupported_reason`.
            slopes: H slopes or None.
            window: keys that a query sees, or None.
            starts: int32 [B, H, blocks], keys before which a block need not read, forward or
                backward; None reads all.
        """
        ...

    def attention_with_logsumexp(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output of `attention` and log-sum-exp fp32 [B, H, Tq], without gradients."""
        ...

    def first_key_per_block(
        self, q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float
    ) -> Tensor:
        """`starts` such that each row leaves out at most epsilon of its probability.

        Faster and looser than `model.pruning.bounds.first_key_per_block`: it uses norms and each
        row's score of its own key only. Slopes are above 0, epsilon is above 0 and below 1.
        """
        ...

    def weight_gradient(self, gradient: Tensor, values: Tensor, out: Tensor) -> bool:
        """out (bf16) = gradient^T values, or out (fp32) += gradient^T values without rounding.

        False, and nothing done, where that gains nothing over torch.

        Args:
            gradient: [N, M].
            values: [N, K].
            out: [M, K].
        """
        ...

    def loss_forward(self, logits: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
        """Fill losses fp32 [N] with the cross entropy of logits [N, V]; log-sum-exps fp32 [N]."""
        ...

    def loss_backward(
        self, logits: Tensor, targets: Tensor, logsumexp: Tensor, factors: Tensor, out: Tensor
    ) -> None:
        """Fill out, which may be logits, with factors x (softmax - one hot)."""
        ...


_SUBPACKAGES = ("amx",)
_registered: list[Backend] = []


def register(backend: Backend) -> None:
    """Offer a backend; the first one registered is used."""
    _registered.append(backend)


@cache
def backend() -> Backend | None:
    """The backend for this CPU's instructions, or None. It may still fail to compile."""
    for name in _SUBPACKAGES:
        importlib.import_module(f"{__name__}.{name}")
    return _registered[0] if _registered else None


def unavailable_reason() -> str | None:
    """Why this machine has no compiled CPU kernels, or None. Compiles them on the first call."""
    registered = backend()
    return "no AMX" if registered is None else registered.unavailable_reason()


def backend_for(values: Tensor) -> Backend | None:
    """The backend for operations on `values`, compiled and loaded, or None."""
    if values.dtype != torch.bfloat16 or values.device.type != "cpu":
        return None
    return backend() if unavailable_reason() is None else None
