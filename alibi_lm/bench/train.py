"""Training steps of this project's model and of baselines, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from alibi_lm.bench.baselines import SAME_PARAMETERS, SIZES, ModelSize, available
from alibi_lm.bench.interleaved_timing import Ratio, interleaved, markdown, paired_ratio, publish
from alibi_lm.bench.processes import Job, RooflineProcess, TrainingProcess
from alibi_lm.bench.roofline import Rate
from alibi_lm.model.flops import flops_per_token
from alibi_lm.utils.errors import ConfigError, Problem

WARM_UPS = 2
"""Steps before the first that counts: they compile, allocate and fill the optimizer's state."""
MEMORY_STEPS = 4
"""Further steps of a process whose peak memory is read."""


@dataclass(frozen=True)
class TrainBenchmark:
    """Settings of `benchmark_train`."""

    size: str = "4m"
    sequence_length: int = 512
    num_tokens: int = 4096
    """Tokens a step."""
    names: Sequence[str] = ("alibi", "none", "mpt", "bloom")
    """The models; the others are compared with the first."""
    repeats: int = 7
    memory_starts: int = 1
    """Processes of each model whose peak memory is read."""


def benchmark_train(settings: TrainBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Train each model in bf16 under DeepSpeed's ZeRO stage 1, the steps interleaved.

    Each model has its own process, except that those of `baselines.SAME_PARAMETERS` share one:
    where memory happens to lie makes the steps of a process some percent faster or slower. Ratios
    are of steps in the same round. MFU is PaLM's count (see `flops_per_token`) over the rate of
    plain matrix products of the model's own sizes, forward and backward, measured in the same
    rounds. Peak memory is read in separate processes, one for each model and start: it depends on
    how threads meet in the allocator, which differs from start to start.

    Raises:
        ConfigError: a model's package is not installed, or a step is not whole sequences.
    """
    _check(settings)
    size = ModelSize(settings.size, settings.sequence_length)
    threads = torch.get_num_threads()
    jobs = [Job(names, size, settings.num_tokens, threads) for names in groups(settings.names)]
    measured: list[tuple[Rate, float]] = []
    with ExitStack() as stack:
        limits = RooflineProcess(SIZES[settings.size], settings.num_tokens, threads)
        stack.enter_context(closing(limits))
        processes = [stack.enter_context(closing(TrainingProcess(job))) for job in jobs]

        def roofline() -> float:
            measured.append(limits.measure())
            return 1.0

        steps: dict[str, Callable[[], float]] = {}
        for job, process in zip(jobs, processes, strict=True):
            steps |= {name: partial(process.step, name) for name in job.names}
        seconds = interleaved(steps | {"roofline": roofline}, settings.repeats, WARM_UPS)
        profile = processes[0].profile()
    alone = {name: replace(jobs[0], names=(name,)) for name in settings.names}
    peaks = _peaks(alone, settings.memory_starts)
    rates = [rate for rate, _ in measured[WARM_UPS:]]
    flops = flops_per_token(size.config("alibi"), settings.sequence_length) * settings.num_tokens
    first = settings.names[0]
    models: dict[str, dict[str, Any]] = {}
    for name in settings.names:
        pairs = zip(seconds[name], rates, strict=False)
        models[name] = {
            "seconds": seconds[name],
            "tokens_per_second": settings.num_tokens / median(seconds[name]),
            "mfu": median(flops / taken / rate.step for taken, rate in pairs),
            "peak_bytes": peaks[name],
            "time": paired_ratio(seconds[name], seconds[first]).as_dict(),
            "memory": paired_ratio(peaks[name], peaks[first]).as_dict(),
        }
    result: dict[str, Any] = asdict(settings) | {
        "threads": threads,
        "torch": torch.__version__,
        "matmul_rates": [rate.step for rate in rates],
        "matmul_rate": median(rate.step for rate in rates),
        "forward_matmul_rate": median(rate.forward for rate in rates),
        "bandwidth": median(bandwidth for _, bandwidth in measured[WARM_UPS:]),
        "profile": profile,
        "models": models,
    }
    publish(result, benchmark_lines(result), path)
    return result


def _check(settings: TrainBenchmark) -> None:
    for name in settings.names:
        if not available(name):
            fix = f"pip install {name}, or leave it out"
            raise ConfigError(Problem("--model", name, "is not installed", fix))
    if settings.num_tokens % settings.sequence_length:
        rule = f"is no multiple of --sequence-length {settings.sequence_length}"
        raise ConfigError(
            Problem("--num-tokens", settings.num_tokens, rule, "give whole sequences")
        )


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The models of each process, starting with the first model's."""
    shared = tuple(name for name in names if name in SAME_PARAMETERS)
    return list(dict.fromkeys(shared if name in shared else (name,) for name in names))


def _peaks(jobs: Mapping[str, Job], starts: int) -> dict[str, list[int]]:
    """Peak bytes of each model's process after a few steps, one value a start."""
    peaks: dict[str, list[int]] = {name: [] for name in jobs}
    for _ in range(starts):
        for name, job in jobs.items():
            with closing(TrainingProcess(job)) as process:
                for _ in range(WARM_UPS + MEMORY_STEPS):
                    process.step(name)
                peaks[name].append(process.memory())
    return peaks


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """A table of the models, and the first one's profile."""
    first = result["names"][0]
    headings = ("model", "tokens/s", f"time / {first}", "MFU", "memory, MiB", f"/ {first}")
    rows = [
        (
            name,
            f"{model['tokens_per_second']:,.0f}",
            str(Ratio(**model["time"])),
            f"{model['mfu']:.0%}",
            f"{median(model['peak_bytes']) / 2**20:,.0f}",
            str(Ratio(**model["memory"])),
        )
        for name, model in result["models"].items()
    ]
    title = (
        f"training steps, {result['size']}, {result['sequence_length']} tokens a sequence, "
        f"{result['num_tokens']:,} a step, bf16, {result['threads']} threads; matrix products "
        f"{result['matmul_rate'] / 1e9:,.0f} GFLOP/s (forward "
        f"{result['forward_matmul_rate'] / 1e9:,.0f}), memory {result['bandwidth'] / 1e9:.1f} GB/s"
    )
    profile = dict(result["profile"])
    total = profile.pop("all")
    shares = sorted(profile.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in shares)
    return [title, "", *markdown(headings, rows), "", f"{first}: {parts}"]
