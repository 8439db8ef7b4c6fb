"""What the machine can do at a model's own shapes, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from alibi_lm.bench.turns import timed

PARTS: Mapping[str, tuple[str, ...]] = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn"),
    "attention": ("alibi_lm::attention", "scaled_dot_product"),
    "loss": ("alibi_lm::loss", "softmax", "nll_loss"),
    "transposes": ("alibi_lm::transpose",),
    "optimizer": ("adam",),
    "norms": ("layer_norm",),
    "gelu": ("gelu",),
    "embedding": ("embedding", "index"),
    "copies": ("copy_", "aten::cat", "aten::fill_", "aten::zero_"),
    "sums": ("aten::add", "aten::mul", "aten::sum", "aten::sub", "aten::div"),
}
"""Parts of a step by what the names of its operations contain; the first that matches counts."""

BEST_OF = 3
"""A product counts by the best of this many calls: what the machine can do, caches warm."""


@dataclass(frozen=True)
class Product:
    """[rows, inner] @ [inner, columns], `times` of them in a forward pass."""

    rows: int
    inner: int
    columns: int
    times: int

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them."""
        return 2.0 * self.rows * self.inner * self.columns * self.times


def products(size: Mapping[str, int], num_tokens: int) -> list[Product]:
    """The products of a forward pass with weights."""
    width, layers = size["hidden_size"], size["num_layers"]
    return [
        Product(num_tokens, width, 3 * width, layers),
        Product(num_tokens, width, width, layers),
        Product(num_tokens, width, 4 * width, layers),
        Product(num_tokens, 4 * width, width, layers),
        Product(num_tokens, width, size["vocab_size"], 1),
    ]


def product_rate(
    size: Mapping[str, int], num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], float]:
    """A measurement of FLOP/s: of these products, plain and into memory that is there already."""
    shapes = products(size, num_tokens)
    tensors = [
        (torch.randn(p.rows, p.inner).to(dtype), torch.randn(p.inner, p.columns).to(dtype),
         torch.empty(p.rows, p.columns, dtype=dtype))
        for p in shapes
    ]  # fmt: skip

    def measure() -> float:
        seconds = 0.0
        for shape, (left, right, out) in zip(shapes, tensors, strict=True):
            product = timed(partial(torch.mm, left, right, out=out))
            seconds += shape.times * min(product() for _ in range(BEST_OF))
        return sum(shape.flops for shape in shapes) / seconds

    return measure


def memory_bandwidth(megabytes: int = 256) -> Callable[[], float]:
    """A measurement of bytes/s: read and written by a copy larger than the caches."""
    source = torch.ones(megabytes << 18, dtype=torch.float32)
    target = torch.empty_like(source)

    copy = timed(partial(target.copy_, source))
    return lambda: 2 * source.numel() * source.element_size() / copy()


def profile_step(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of one step by `PARTS`, the rest under "other", and all of it under "all"."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    found = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in recorded.key_averages():
        part = next((part for part, names in PARTS.items()
                     if any(name in event.key.lower() for name in names)), "other")  # fmt: skip
        found[part] += event.self_cpu_time_total / 1e6
    return found | {"all": sum(found.values())}
