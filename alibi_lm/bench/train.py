"""Training steps of this project's model and of its peers, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from alibi_lm.bench.baselines import SAME_PARAMETERS, SIZES, Shape, available
from alibi_lm.bench.interleaved_timing import Ratio, interleaved, markdown, paired_ratio, publish
from alibi_lm.bench.roofline import Machine, Rate
from alibi_lm.bench.stepping import Job, Trainee
from alibi_lm.model.flops import flops_per_token
from alibi_lm.utils.errors import ConfigError, Problem

WARM_UPS = 2
"""Steps before the first that counts: they compile, allocate and fill the optimizer's state."""

MEMORY_STEPS = 4
"""Further steps of a process whose peak of memory is wanted."""


@dataclass(frozen=True)
class TrainBenchmark:
    """What `benchmark_train` is to measure."""

    size: str = "4m"
    sequence_length: int = 512
    num_tokens: int = 4096
    """Tokens of a step."""
    names: Sequence[str] = ("alibi", "none", "mpt", "bloom")
    """The models, the one that the others are compared with first."""
    repeats: int = 7
    memory_starts: int = 1
    """Processes of each model whose peak of memory is read."""


def benchmark_train(settings: TrainBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Train each model a step at a time, in turns, in bf16 under DeepSpeed's ZeRO stage 1.

    Each is a process of its own, but for those of `peers.SAME_PARAMETERS`: they take turns in one,
    because what lies where in a process's memory makes its steps some percent faster or slower.
    Ratios are those of the same turn. MFU is PaLM's (see `flops_per_token`) over the rate of plain
    products of the model's own shapes, those of the backward pass included, measured in turns with
    the steps. Peaks of memory are those of other processes, one for each model and start: a peak
    hangs on how threads met in the allocator, and that differs from start to start.

    Raises:
        ConfigError: a model's package is not installed, or a step's tokens are not whole sequences.
    """
    for name in settings.names:
        if not available(name):
            fix = f"pip install {name}, or leave it out"
            raise ConfigError(Problem("--model", name, "is not installed", fix))
    if settings.num_tokens % settings.sequence_length:
        rule = f"is no multiple of --sequence-length {settings.sequence_length}"
        raise ConfigError(
            Problem("--num-tokens", settings.num_tokens, rule, "give whole sequences")
        )
    shape = Shape(settings.size, settings.sequence_length)
    threads = torch.get_num_threads()
    jobs = [Job(names, shape, settings.num_tokens, threads) for names in groups(settings.names)]
    measured: list[tuple[Rate, float]] = []
    with ExitStack() as stack:
        rates = Machine(SIZES[settings.size], settings.num_tokens, threads)
        stack.enter_context(closing(rates))
        started = [stack.enter_context(closing(Trainee(job))) for job in jobs]

        def machine() -> float:
            measured.append(rates.measure())
            return 1.0

        ways: dict[str, Callable[[], float]] = {}
        for job, trainee in zip(jobs, started, strict=True):
            ways |= {name: partial(trainee.step, name) for name in job.names}
        seconds = interleaved(ways | {"machine": machine}, settings.repeats, WARM_UPS)
        profile = started[0].profile()
    alone = {name: replace(jobs[0], names=(name,)) for name in settings.names}
    peaks = _peaks(alone, settings.memory_starts)
    possible = [rate for rate, _ in measured[WARM_UPS:]]
    flops = flops_per_token(shape.model("alibi"), settings.sequence_length) * settings.num_tokens
    result: dict[str, Any] = asdict(settings) | {
        "threads": threads,
        "torch": torch.__version__,
        "product_rates": [rate.step for rate in possible],
        "product_rate": median(rate.step for rate in possible),
        "forward_product_rate": median(rate.forward for rate in possible),
        "bandwidth": median(bandwidth for _, bandwidth in measured[WARM_UPS:]),
        "profile": profile,
        "models": {
            name: {
                "seconds": seconds[name],
                "tokens_per_second": settings.num_tokens / median(seconds[name]),
                "mfu": median(
                    flops / taken / rate.step
                    for taken, rate in zip(seconds[name], possible, strict=False)
                ),
                "peak_bytes": peaks[name],
                "time": paired_ratio(seconds[name], seconds[settings.names[0]]).as_dict(),
                "memory": paired_ratio(peaks[name], peaks[settings.names[0]]).as_dict(),
            }
            for name in settings.names
        },
    }
    publish(result, benchmark_lines(result), path)
    return result


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The models that each process trains, the first model's first."""
    alike = tuple(name for name in names if name in SAME_PARAMETERS)
    found: list[tuple[str, ...]] = []
    for name in names:
        group = alike if name in alike else (name,)
        if group not in found:
            found.append(group)
    return found


def _peaks(jobs: Mapping[str, Job], starts: int) -> dict[str, list[int]]:
    """Bytes of the peak of each process that makes a few steps of a model, start by start."""
    found: dict[str, list[int]] = {name: [] for name in jobs}
    for _ in range(starts):
        for name, job in jobs.items():
            with closing(Trainee(job)) as trainee:
                for _ in range(WARM_UPS + MEMORY_STEPS):
                    trainee.step(name)
                found[name].append(trainee.memory())
    return found


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """A table of the models, and where the first one's time goes."""
    first = result["names"][0]
    headings = ("model", "tokens/s", f"time / {first}", "MFU", "memory, MiB", f"/ {first}")
    rows = []
    for name, found in result["models"].items():
        rows.append((
            name, f"{found['tokens_per_second']:,.0f}", str(Ratio(**found["time"])),
            f"{found['mfu']:.0%}", f"{median(found['peak_bytes']) / 2**20:,.0f}",
            str(Ratio(**found["memory"])),
        ))  # fmt: skip
    title = (f"training steps, {result['size']}, {result['sequence_length']} tokens a sequence, "
             f"{result['num_tokens']:,} a step, bf16, {result['threads']} threads; plain products "
             f"at {result['product_rate'] / 1e9:,.0f} GFLOP/s (forward "
             f"{result['forward_product_rate'] / 1e9:,.0f}), memory at "
             f"{result['bandwidth'] / 1e9:.1f} GB/s")  # fmt: skip
    whole = result["profile"]["all"]
    shares = sorted(((part, seconds) for part, seconds in result["profile"].items()
                     if part != "all"), key=lambda each: -each[1])  # fmt: skip
    parts = ", ".join(f"{part} {seconds / whole:.1%}" for part, seconds in shares)
    return [title, "", *markdown(headings, rows), "", f"{first}: {parts}"]
