"""Every attention kernel of a GPU against float64, and what each costs: `bench gpu-check`.

The same code runs on a CPU at small sizes, in a test; there it says nothing about speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.model.attention.dispatch import KERNELS, AttentionRequest, attention
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.files import write_json
from alibi_lm.utils.logging import console

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""||ours - exact|| / ||exact|| that a kernel may have, as in the tests of the CPU's."""
EPSILON = 1e-3
"""Pruning tolerance where the bound is checked: large enough to be seen beside rounding."""
M125 = ModelConfig(num_layers=12, hidden_size=768, num_heads=12, vocab_size=32000)


@dataclass
class GpuCheck:
    """What is checked and timed."""

    device: str = "cuda"
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    lengths: Sequence[tuple[int, int]] = ((128, 128), (1000, 1000), (4096, 4096), (130, 1000))
    """Queries and keys of what is compared with float64."""
    heads: Sequence[tuple[int, int]] = ((8, 8), (12, 12), (12, 4))
    """Query and key heads."""
    windows: Sequence[int | None] = (None, 100)
    width: int = 64
    timed: Sequence[int] = (2048, 8192, 32768)
    timed_heads: int = 12
    repeats: int = 7
    model: ModelConfig = field(default_factory=lambda: M125)
    batch: tuple[int, int] = (8, 2048)
    """Samples and tokens of the training step."""


def gpu_check(settings: GpuCheck, path: Path) -> dict[str, Any]:
    """Check and time the kernels, write the result as JSON and say it.

    Args:
        settings: what to do.
        path: the JSON file.

    Returns:
        The result; `failed` lists the checks that did not hold.

    Raises:
        ConfigError: there is no such device.
    """
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        fix = "run it where torch.cuda.is_available() is true"
        raise ConfigError(Problem("bench gpu-check", None, "torch finds no CUDA device", fix))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "kernels": {}}
    for kernel in KERNELS:
        result["kernels"][kernel] = _offers(kernel, device)
    usable = [kernel for kernel, lacking in result["kernels"].items() if lacking is None]
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("correct", lambda: list(_correctness(settings, device, usable))),
        ("pruning", lambda: list(_pruning_bounds(settings, device, usable))),
        ("timed", lambda: list(_timings(settings, device, usable))),
        ("training", lambda: _training(settings, device)),
    ]
    for key, part in parts:
        result[key] = part()
        checks = [*result.get("correct", []), *result.get("pruning", [])]
        result["failed"] = [row for row in checks if not row["held"]]
        write_json(path, result)
    for line in check_lines(result):
        console.info(line)
    console.info(f"bench gpu-check: {path}")
    return result


def _offers(kernel: str, device: torch.device) -> str | None:
    """What keeps a kernel from running here at all, or None."""
    row = KERNELS[kernel]
    if row.devices is not None and device.type not in row.devices:
        return f"device {device.type}"
    return None if row.missing is None else row.missing(device)


def _inputs(
    shape: tuple[int, int, int, int], kv_heads: int, keys: int, like: Tensor
) -> list[Tensor]:
    """q, k, v and a gradient of q's shape, in the dtype and on the device of `like`."""
    batch, heads, queries, width = shape
    generator = torch.Generator().manual_seed(heads * 1_000_003 + keys * 101 + queries)
    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)
    drawn = (torch.randn(batch, h, n, width, generator=generator) for h, n in sizes)
    return [x.to(like) for x in drawn]


def exact_results(
    inputs: Sequence[Tensor], slopes: tuple[float, ...], window: int | None
) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, head by head, by the formula.

    Args:
        inputs: q [B, H, Tq, D], k and v [B, KV, Tk, D], the output's gradient.
        slopes: of the H heads.
        window: keys that a query sees, or None.
    """
    q, k, v, grad = (x.double() for x in inputs)
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    row = torch.arange(offset, k.shape[2], device=q.device).unsqueeze(1)
    distance = row - torch.arange(k.shape[2], device=q.device)
    unseen = distance < 0
    if window is not None:
        unseen = unseen | (distance >= window)
    output, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for head, slope in enumerate(slopes):
        own = [q[:, head], k[:, head // group], v[:, head // group]]
        own = [x.detach().clone().requires_grad_() for x in own]
        scores = own[0] @ own[1].transpose(1, 2) / math.sqrt(q.shape[3]) - slope * distance
        mixed = scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ own[2]
        found = torch.autograd.grad(mixed, own, grad[:, head])
        output[:, head], dq[:, head] = mixed.detach(), found[0]
        dk[:, head // group] += found[1]
        dv[:, head // group] += found[2]
    return [output, dq, dk, dv]


def _run(
    inputs: Sequence[Tensor], slopes: tuple[float, ...], window: int | None, kernel: str,
    epsilon: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """The kernel's output and gradients of q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    output = attention(*leaves, slopes=slopes, window=window, kernel=kernel, epsilon=epsilon)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]


def _correctness(
    settings: GpuCheck, device: torch.device, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Each kernel's largest relative error over output and gradients, case by case."""
    cases = [
        (dtype, heads, length, window)
        for dtype in settings.dtypes
        for heads in settings.heads
        for length in settings.lengths
        for window in settings.windows
    ]
    for dtype, (heads, kv_heads), (queries, keys), window in cases:
        like = torch.empty(0, dtype=dtype, device=device)
        inputs = _inputs((1, heads, queries, settings.width), kv_heads, keys, like)
        slopes = alibi_slopes(heads)
        exact = exact_results(inputs, slopes, window)
        for kernel in kernels:
            q, k, v = inputs[:3]
            lacking = KERNELS[kernel].unsupported_reason(
                q, k, v, AttentionRequest(slopes, window, None)
            )
            if lacking:
                continue
            found = _run(inputs, slopes, window, kernel)
            errors = [
                float((ours.double() - right).norm() / right.norm())
                for ours, right in zip(found, exact, strict=True)
            ]
            yield {
                "kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "heads": heads,
                "kv_heads": kv_heads, "queries": queries, "keys": keys, "window": window,
                "errors": errors, "held": max(errors) <= TOLERANCE[dtype],
            }  # fmt: skip


def _pruning_bounds(
    settings: GpuCheck, device: torch.device, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The error of pruning against its bound, at the longest length that is checked."""
    length = max(queries for queries, _ in settings.lengths)
    heads, kv_heads = settings.heads[-1]
    slopes = alibi_slopes(heads)
    for dtype in settings.dtypes:
        like = torch.empty(0, dtype=dtype, device=device)
        inputs = _inputs((1, heads, length, settings.width), kv_heads, length, like)
        exact = exact_results(inputs, slopes, None)[0]
        largest = float(inputs[2].double().norm(dim=-1).max())
        for kernel in kernels:
            request = AttentionRequest(slopes, None, None, EPSILON)
            q, k, v = inputs[:3]
            if not KERNELS[kernel].prunes(length) or KERNELS[kernel].unsupported_reason(
                q, k, v, request
            ):
                continue
            own, ours = (
                float((_run(inputs, slopes, None, kernel, epsilon)[0].double() - exact)
                      .norm(dim=-1).max())
                for epsilon in (0.0, EPSILON)
            )  # fmt: skip
            allowed = 2 * EPSILON * largest + 2 * own
            yield {
                "kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "length": length,
                "error": ours, "allowed": allowed, "held": ours <= allowed,
            }  # fmt: skip


def _clock(device: torch.device, function: Callable[[], object]) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _medians(
    device: torch.device, functions: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Median seconds of each, interleaved, after one call that is not counted."""
    for function in functions.values():
        function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            taken[name].append(_clock(device, function))
    return {name: median(values) for name, values in taken.items()}


def _timings(
    settings: GpuCheck, device: torch.device, kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Seconds of kernels with biases, with and without pruning, against torch's causal SDPA."""
    heads = settings.timed_heads
    slopes = alibi_slopes(heads)
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    for length in settings.timed:
        q, k, v, grad = _inputs((1, heads, length, settings.width), heads, length, like)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        calls: dict[str, Callable[[], Tensor]] = {"sdpa": sdpa}
        for kernel in kernels:
            variants: list[tuple[str, tuple[float, ...] | None, float]] = [
                ("", slopes, 0.0), (" without bias", None, 0.0)
            ]  # fmt: skip
            if KERNELS[kernel].prunes(length):
                variants.append((" pruning", slopes, 1e-6))
            for suffix, biases, epsilon in variants:
                request = AttentionRequest(biases, None, None, epsilon)
                if KERNELS[kernel].unsupported_reason(q, k, v, request) is None:
                    calls[kernel + suffix] = _call(leaves, biases, epsilon, kernel)
        yield {
            "length": length,
            "forward": _medians(device, {n: _forward(c) for n, c in calls.items()},
                                settings.repeats),
            "forward_backward": _medians(
                device, {n: _both(c, leaves, grad) for n, c in calls.items()}, settings.repeats
            ),
        }  # fmt: skip


def _call(
    leaves: list[Tensor], slopes: tuple[float, ...] | None, epsilon: float, kernel: str
) -> Callable[[], Tensor]:
    return lambda: attention(*leaves, slopes=slopes, epsilon=epsilon, kernel=kernel)


def _forward(call: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def _both(call: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(call(), leaves, grad)


def _training(settings: GpuCheck, device: torch.device) -> dict[str, Any]:
    """Tokens a second of a training step in bf16, with linear biases and with no positions."""
    batch, length = settings.batch
    rows: dict[str, Any] = {"batch": batch, "length": length}
    tokens = torch.randint(settings.model.vocab_size or 1, (batch, length + 1), device=device)
    for position in ("alibi", "none"):
        config = ModelConfig(**{**vars(settings.model), "position": position})
        model = Decoder(config).to(device, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

        def step(model: Decoder = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
            optimizer.step()

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = _medians(device, {position: step}, settings.repeats)[position]
        rows[position] = {"seconds": seconds, "tokens_a_second": batch * length / seconds}
        if device.type == "cuda":
            rows[position]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        del model, optimizer
    return rows


def check_lines(result: dict[str, Any]) -> list[str]:
    """The result for the terminal."""
    lines = [f"{result['device']}, torch {result['torch']}"]
    for kernel, lacking in result["kernels"].items():
        own = [row for row in result["correct"] if row["kernel"] == kernel]
        worst = max((max(row["errors"]) for row in own), default=0.0)
        words = f"{len(own)} cases, largest relative error {worst:.1e}"
        lines.append(f"{kernel}: {words if lacking is None else f'not here ({lacking})'}")
    for row in result["failed"]:
        lines.append(f"FAILED: {row}")
    for row in result["timed"]:
        for key in ("forward", "forward_backward"):
            floor = row[key]["sdpa"]
            words = ", ".join(f"{n} {s / floor:.2f}" for n, s in row[key].items() if n != "sdpa")
            lines.append(f"{row['length']:,} {key}: sdpa {1e3 * floor:.2f} ms; to it: {words}")
    training = result["training"]
    for position in ("alibi", "none"):
        row = training[position]
        memory = f", peak {row['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in row else ""
        rate = f"{row['tokens_a_second']:,.0f} tokens/s"
        lines.append(f"training step, position {position}: {rate}{memory}")
    ratio = training["alibi"]["seconds"] / training["none"]["seconds"]
    lines.append(f"alibi over none: {ratio:.3f}")
    return lines
