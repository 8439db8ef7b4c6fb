"""Time, memory and exactness of the output layer's loss beside the plain way and torch's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish, timed
from alibi_lm.model.cross_entropy import linear_cross_entropy
from alibi_lm.utils.memory import peak_resident_bytes, resident_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LossBenchmark:
    """What `benchmark_loss` is to measure."""

    vocab_size: int = 250_880
    hidden_size: int = 1024
    num_tokens: int = 4096
    precision: str = "bf16"
    repeats: int = 7
    """Turns of the times."""
    memory_repeats: int = 1
    """Processes of each way whose memory is read."""


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets).mean()


def _torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "ours": _ours,
    "torch": _torch,
}
"""The mean loss: F.linear, fp32 logits and F.cross_entropy; this project's; torch's chunked one."""


def benchmark_loss(settings: LossBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Measure forward and backward, say the result, and write it to `path`.

    Bytes are what the resident memory of a process of its own rises by from the ready inputs
    (hidden states, weight, targets) to the peak: both gradients count, the inputs do not.
    """
    memory = {way: [_memory(settings, way) for _ in range(settings.memory_repeats)] for way in WAYS}
    inputs = _inputs(settings)
    result: dict[str, Any] = asdict(settings) | {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "difference": _difference(inputs),
        "bytes": memory,
    }
    ways = {way: timed(partial(_step, way, inputs)) for way in WAYS}
    seconds = result["seconds"] = interleaved(ways, settings.repeats, warm_ups=0)
    others = [way for way in WAYS if way != "plain"]
    result["memory_ratio"] = {w: median(memory[w]) / median(memory["plain"]) for w in others}
    result["time_ratio"] = {w: paired_ratio(seconds[w], seconds["plain"]).as_dict() for w in others}
    publish(result, benchmark_lines(result), path)
    return result


def _inputs(settings: LossBenchmark) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype, width = DTYPES[settings.precision], settings.hidden_size
    hidden = torch.randn(settings.num_tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(settings.vocab_size, width, generator=generator, dtype=dtype)
    weight.mul_(width**-0.5)
    targets = torch.randint(settings.vocab_size, (settings.num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _step(way: str, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The loss and its gradients."""
    loss = WAYS[way](*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs[:2])]


def _difference(inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, dict[str, float]]:
    """How far loss and gradients are from the plain way's: norm of the difference over its norm."""
    expected = _step("plain", inputs)
    names = ("loss", "hidden_gradient", "weight_gradient")
    found = {}
    for way in WAYS:
        if way == "plain":
            continue
        got = _step(way, inputs)
        found[way] = {
            name: float((a.float() - b.float()).norm() / b.float().norm())
            for name, a, b in zip(names, got, expected, strict=True)
        }
    return found


_PROGRAM = """
import json, sys
from alibi_lm.bench.loss import LossBenchmark, peak_of_step
settings = LossBenchmark(**json.loads(sys.argv[1]))
sys.stdout.write(str(peak_of_step(settings, sys.argv[2])))
"""


def _memory(settings: LossBenchmark, way: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(settings)), way]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def peak_of_step(settings: LossBenchmark, way: str) -> int:
    """Bytes by which this process's resident memory rises in a forward and backward."""
    inputs = _inputs(settings)
    before = resident_bytes()
    _step(way, inputs)
    return peak_resident_bytes() - before


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result for the terminal, as a table."""
    rows = []
    for way in WAYS:
        row = [
            way,
            f"{median(result['seconds'][way]):.2f} s",
            f"{median(result['bytes'][way]) / 2**20:,.0f} MiB",
        ]
        if way == "plain":
            row += ["1", "1", ""]
        else:
            ratio = result["time_ratio"][way]
            row += [
                f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{result['memory_ratio'][way]:.3f}",
                f"{max(result['difference'][way].values()):.1e}",
            ]
        rows.append(row)
    turns = min(len(times) for times in result["seconds"].values())
    headings = ["way", "time", "peak memory", "time to plain", "memory to plain", "difference"]
    return [
        f"loss, forward and backward: {result['num_tokens']:,} tokens, vocabulary "
        f"{result['vocab_size']:,}, hidden size {result['hidden_size']:,}, "
        f"{result['precision']}, {result['threads']} threads; medians of {turns} interleaved "
        f"repetitions",
        *markdown(headings, rows),
    ]
