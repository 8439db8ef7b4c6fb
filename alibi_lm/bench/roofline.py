"""The machine's limits at a model's own matrix sizes, and a profile of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from alibi_lm.bench.interleaved_timing import timed

PARTS: Mapping[str, tuple[str, ...]] = {
    "matmuls": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "mkldnn",
        "alibi_lm::weight_gradient",
    ),
    "attention": ("alibi_lm::attention", "scaled_dot_product"),
    "loss": ("alibi_lm::loss", "softmax", "nll_loss"),
    "optimizer": ("adam",),
    "norms": ("layer_norm",),
    "gelu": ("gelu",),
    "embedding": ("embedding", "index"),
    "copies": ("copy_", "aten::cat", "aten::fill_", "aten::zero_"),
    "sums": ("aten::add", "aten::mul", "aten::sum", "aten::sub", "aten::div"),
}
"""Parts of a step and the substrings of their operator names; the first match counts."""

BEST_OF = 3
"""Calls of each product, of which the fastest counts: the limit, with warm caches."""


@dataclass(frozen=True)
class Matmul:
    """[rows, inner] @ [inner, columns], `times` of them in a forward pass."""

    rows: int
    inner: int
    columns: int
    times: int

    @property
    def flops(self) -> float:
        """FLOPs of all of them in a forward pass.

        The backward pass has two such products: the gradients of the input and of the weight.
        """
        return 2.0 * self.rows * self.inner * self.columns * self.times


def matmuls(size: Mapping[str, int], num_tokens: int) -> list[Matmul]:
    """The products with weights in a forward pass."""
    width, layers = size["hidden_size"], size["num_layers"]
    return [
        Matmul(num_tokens, width, 3 * width, layers),
        Matmul(num_tokens, width, width, layers),
        Matmul(num_tokens, width, 4 * width, layers),
        Matmul(num_tokens, 4 * width, width, layers),
        Matmul(num_tokens, width, size["vocab_size"], 1),
    ]


@dataclass(frozen=True)
class Rate:
    """FLOP/s of matrix products."""

    forward: float
    step: float
    """Forward and backward pass together."""


def matmul_rate(
    size: Mapping[str, int], num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Rate]:
    """A measurement of the products of a forward and backward pass into preallocated memory."""
    measurements = []
    for matmul in matmuls(size, num_tokens):
        inputs = torch.randn(matmul.rows, matmul.inner).to(dtype)
        weight = torch.randn(matmul.columns, matmul.inner).to(dtype)
        gradient = torch.randn(matmul.rows, matmul.columns).to(dtype)
        operands = {
            "output": (inputs, weight.t(), torch.empty_like(gradient)),
            "input gradient": (gradient, weight, torch.empty_like(inputs)),
            "weight gradient": (gradient.t(), inputs, torch.empty_like(weight)),
        }
        for kind, (left, right, out) in operands.items():
            measurements.append((kind, matmul, timed(partial(torch.mm, left, right, out=out))))

    def measure() -> Rate:
        flops, forward, total = 0.0, 0.0, 0.0
        for kind, matmul, seconds in measurements:
            taken = matmul.times * min(seconds() for _ in range(BEST_OF))
            flops += matmul.flops
            total += taken
            forward += taken * (kind == "output")
        return Rate(flops / 3 / forward, flops / total)

    return measure


def memory_bandwidth(megabytes: int = 256) -> Callable[[], float]:
    """A measurement of the bytes/s read and written by a copy larger than the caches."""
    source = torch.ones(megabytes << 18, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = timed(partial(target.copy_, source))
    return lambda: 2 * source.numel() * source.element_size() / copy()


def profile_step(step: Callable[[], None]) -> dict[str, float]:
    """CPU seconds of one step by `PARTS`, with the rest as "other" and the total as "all"."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    seconds = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in recorded.key_averages():
        seconds[_part_of(event.key.lower())] += event.self_cpu_time_total / 1e6
    return seconds | {"all": sum(seconds.values())}


def _part_of(operator: str) -> str:
    for part, names in PARTS.items():
        if any(name in operator for name in names):
            return part
    return "other"
