"""What the machine can do at a model's own shapes, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch.profiler import ProfilerActivity, profile

from alibi_lm.bench.interleaved_timing import timed
from alibi_lm.bench.worker import Worker, answer
from alibi_lm.utils.memory import keep_freed_memory, use_huge_pages

PARTS: Mapping[str, tuple[str, ...]] = {
    "products": (
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
"""Parts of a step by what the names of its operations contain; the first that matches counts."""

BEST_OF = 3
"""A product counts by the best of this many calls: what the machine can do, caches warm."""


class Machine(Worker):
    """A process that measures products of a model's size and copies, in memory as training has."""

    def __init__(self, size: Mapping[str, int], num_tokens: int, num_threads: int) -> None:
        super().__init__("the machine's rates", _serve, (size, num_tokens, num_threads))

    def measure(self) -> tuple[Rate, float]:
        """Products' FLOP/s, and bytes/s of a copy."""
        rate, bandwidth = self.ask("rates")
        return rate, bandwidth


def _serve(pipe: Connection, job: tuple[Mapping[str, int], int, int]) -> None:
    size, num_tokens, num_threads = job
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    rate, bandwidth = product_rate(size, num_tokens), memory_bandwidth()
    use_huge_pages()
    answer(pipe, {"rates": lambda: (rate(), bandwidth())})


@dataclass(frozen=True)
class Product:
    """[rows, inner] @ [inner, columns], `times` of them in a forward pass."""

    rows: int
    inner: int
    columns: int
    times: int

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them in a forward pass.

        Each of the two products of the backward pass, for the input's gradient and the weight's,
        has as many.
        """
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


@dataclass(frozen=True)
class Rate:
    """FLOP/s of plain products."""

    forward: float
    step: float
    """Of forward and backward pass together."""


def product_rate(
    size: Mapping[str, int], num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Rate]:
    """A timed run of these matrix products and of their backward pass.

    The backward products are those of torch's autograd; outputs are allocated beforehand.
    """
    tensors = []
    for product in products(size, num_tokens):
        values = torch.randn(product.rows, product.inner).to(dtype)
        weight = torch.randn(product.columns, product.inner).to(dtype)
        gradient = torch.randn(product.rows, product.columns).to(dtype)
        outs = [torch.empty_like(x) for x in (gradient, values, weight)]
        ways = [timed(partial(torch.mm, *pair, out=out)) for pair, out in zip(
            ((values, weight.t()), (gradient, weight), (gradient.t(), values)), outs, strict=True
        )]  # fmt: skip
        tensors.append((product, ways))

    def measure() -> Rate:
        flops, seconds = 0.0, [0.0, 0.0, 0.0]
        for product, ways in tensors:
            flops += product.flops
            for kind, way in enumerate(ways):
                seconds[kind] += product.times * min(way() for _ in range(BEST_OF))
        return Rate(flops / seconds[0], 3 * flops / sum(seconds))

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
