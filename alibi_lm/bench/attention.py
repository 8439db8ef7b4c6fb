"""Attention alone, forward and backward: our kernels beside torch's and the eager way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.bench.baselines import SIZES
from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish, timed
from alibi_lm.model.attention.dispatch import KERNELS, AttentionRequest, attention
from alibi_lm.model.pruning.bounds import DEFAULT_EPSILON
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.utils.errors import ConfigError, Problem

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionBenchmark:
    """What `benchmark_attention` is to measure."""

    size: str = "4m"
    lengths: Sequence[int] = (512, 2048)
    num_tokens: int = 4096
    """Tokens of a call: as many sequences as fit."""
    longest_square: int = 4096
    """Longest sequence for the ways that hold a bias or scores of every pair."""
    repeats: int = 7


def benchmark_attention(settings: AttentionBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Time one layer's attention in bf16 each way, interleaved, by length; print the ratios."""
    if too_long := [length for length in settings.lengths if length > settings.num_tokens]:
        rule = f"holds no sequence of {max(too_long)}"
        raise ConfigError(Problem("--num-tokens", settings.num_tokens, rule, "give more"))
    rows = []
    for length in settings.lengths:
        q, k, v, grad = _inputs(settings, length)
        ways = _ways(q.shape[1], length, settings.longest_square, q)
        actions: dict[str, Callable[[], float]] = {}
        for name, way in ways.items():
            actions[f"{name}, forward"] = timed(partial(_forward, way, q, k, v))
            actions[name] = timed(partial(_both, way, q, k, v, grad))
        seconds = interleaved(actions, settings.repeats)
        first = next(iter(ways))
        for name in ways:
            forward, both = seconds[f"{name}, forward"], seconds[name]
            rows.append({
                "length": length, "way": name,
                "forward": median(forward), "both": median(both),
                "forward_ratio": paired_ratio(forward, seconds[f"{first}, forward"]).as_dict(),
                "ratio": paired_ratio(both, seconds[first]).as_dict(),
            })  # fmt: skip
    result = asdict(settings) | {
        "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    publish(result, benchmark_lines(result), path)
    return result


def _inputs(settings: AttentionBenchmark, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as views of one product, and the gradient of the output."""
    heads = SIZES[settings.size]["num_heads"]
    width = SIZES[settings.size]["hidden_size"] // heads
    generator = torch.Generator().manual_seed(0)
    batch = settings.num_tokens // length
    joint = torch.randn(batch, length, 4, heads, width, generator=generator).bfloat16()
    q, k, v, grad = (part.transpose(1, 2) for part in joint.unbind(2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def _ways(heads: int, length: int, longest_square: int, q: Tensor) -> dict[str, Way]:
    slopes = alibi_slopes(heads)

    def ours(kernel: str, slopes: tuple[float, ...] | None, epsilon: float = 0.0) -> Way:
        return partial(attention, slopes=slopes, epsilon=epsilon, kernel=kernel)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ways: dict[str, Way] = {}
    for kernel in ("amx", "sdpa_cpu"):
        if (
            KERNELS[kernel].unsupported_reason(q, q, q, AttentionRequest(slopes, None, None))
            is None
        ):
            ways[f"{kernel}, alibi"] = ours(kernel, slopes)
            ways[f"{kernel}, alibi, pruning"] = ours(kernel, slopes, DEFAULT_EPSILON)
            ways[f"{kernel}, no bias"] = ours(kernel, None)
    ways["torch, causal without bias"] = causal
    if length <= longest_square:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = -torch.tensor(slopes).view(-1, 1, 1) * distance
        bias = bias.masked_fill(distance < 0, -math.inf).bfloat16()
        ways["torch, dense bias"] = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias
        )
        ways["eager"] = partial(_eager, bias)
    return ways


def _eager(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _forward(way: Way, q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.no_grad():
        way(q, k, v)


def _both(way: Way, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(way(q, k, v), (q, k, v), grad)


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    headings = ("tokens", "attention", "forward, ms", "to the first", "with backward, ms",
                "to the first")  # fmt: skip
    rows = [
        (f"{row['length']:,}", row["way"], f"{1e3 * row['forward']:.1f}",
         f"{row['forward_ratio']['median']:.2f}", f"{1e3 * row['both']:.1f}",
         f"{row['ratio']['median']:.2f} [{row['ratio']['low']:.2f}, {row['ratio']['high']:.2f}]")
        for row in result["rows"]
    ]  # fmt: skip
    title = (f"one layer's attention, {result['size']}, {result['num_tokens']:,} tokens a call, "
             f"bf16, {result['threads']} threads, {result['repeats']} repeats")  # fmt: skip
    return [title, "", *markdown(headings, rows)]
