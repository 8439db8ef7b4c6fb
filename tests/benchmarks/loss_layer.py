"""Time, memory and exactness of the loss, relative to the plain formula and torch's chunked loss.

python tests/benchmarks/loss_layer.py [--precision fp32] [--repeats 7] [--json FILE]

At the default sizes the plain formula takes 12 GiB.
"""

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

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish, timed
from alibi_lm.model.cross_entropy import linear_cross_entropy
from alibi_lm.utils.memory import peak_resident_bytes, resident_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LossBenchmark:
    """Settings of `benchmark_loss`."""

    vocab_size: int = 250_880
    hidden_size: int = 1024
    num_tokens: int = 4096
    precision: str = "bf16"
    repeats: int = 7
    memory_repeats: int = 1
    """Processes of each formula whose peak memory is read."""


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets).mean()


def _torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "ours": _ours,
    "torch": _torch,
}
"""The mean loss: F.linear, fp32 logits and F.cross_entropy; this project's; torch's chunked one."""


def benchmark_loss(settings: LossBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Measure forward and backward, print the result, and write it to `path`.

    Bytes are the rise of a separate process's resident memory from the ready inputs (hidden
    states, weight, targets) to its peak: both gradients count, the inputs do not.
    """
    repeats = range(settings.memory_repeats)
    memory = {name: [_memory(settings, name) for _ in repeats] for name in LOSSES}
    inputs = _inputs(settings)
    result: dict[str, Any] = asdict(settings) | {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "difference": _difference(inputs),
        "bytes": memory,
    }
    steps = {name: timed(partial(_step, name, inputs)) for name in LOSSES}
    seconds = result["seconds"] = interleaved(steps, settings.repeats, warm_ups=0)
    plain = median(memory["plain"])
    others = [name for name in LOSSES if name != "plain"]
    result["memory_ratio"] = {name: median(memory[name]) / plain for name in others}
    result["time_ratio"] = {
        name: paired_ratio(seconds[name], seconds["plain"]).as_dict() for name in others
    }
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


def _step(name: str, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The loss and its gradients."""
    loss = LOSSES[name](*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs[:2])]


def _difference(inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, dict[str, float]]:
    """Norm of the difference to the plain formula over the norm, for loss and gradients."""
    expected = _step("plain", inputs)
    kinds = ("loss", "hidden_gradient", "weight_gradient")
    differences = {}
    for name in LOSSES:
        if name == "plain":
            continue
        got = _step(name, inputs)
        differences[name] = {
            kind: float((a.float() - b.float()).norm() / b.float().norm())
            for kind, a, b in zip(kinds, got, expected, strict=True)
        }
    return differences


def _memory(settings: LossBenchmark, name: str) -> int:
    command = [sys.executable, __file__, "--peak-of", name, json.dumps(asdict(settings))]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def peak_of_step(settings: LossBenchmark, name: str) -> int:
    """Bytes by which this process's resident memory rises in a forward and backward."""
    inputs = _inputs(settings)
    before = resident_bytes()
    _step(name, inputs)
    return peak_resident_bytes() - before


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    rows = []
    for name in LOSSES:
        row = [
            name,
            f"{median(result['seconds'][name]):.2f} s",
            f"{median(result['bytes'][name]) / 2**20:,.0f} MiB",
        ]
        if name == "plain":
            row += ["1", "1", ""]
        else:
            ratio = result["time_ratio"][name]
            row += [
                f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{result['memory_ratio'][name]:.3f}",
                f"{max(result['difference'][name].values()):.1e}",
            ]
        rows.append(row)
    repeats = min(len(times) for times in result["seconds"].values())
    headings = ["loss", "time", "peak memory", "time / plain", "memory / plain", "difference"]
    return [
        f"loss, forward and backward: {result['num_tokens']:,} tokens, vocabulary "
        f"{result['vocab_size']:,}, hidden size {result['hidden_size']:,}, "
        f"{result['precision']}, {result['threads']} threads; medians of {repeats} interleaved "
        f"measurements",
        *markdown(headings, rows),
    ]


@click.command()
@click.option("--precision", type=click.Choice(list(DTYPES)), default="bf16")
@click.option("--vocab-size", type=click.IntRange(2), default=250_880)
@click.option("--hidden-size", type=click.IntRange(1), default=1024)
@click.option("--num-tokens", type=click.IntRange(1), default=4096)
@click.option("--repeats", type=click.IntRange(1), default=7)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(path: Path | None, **settings: Any) -> None:
    """Compare the loss with the plain formula and torch's chunked loss."""
    benchmark_loss(LossBenchmark(**settings), path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak-of"]:
        measured = LossBenchmark(**json.loads(sys.argv[3]))
        sys.stdout.write(str(peak_of_step(measured, sys.argv[2])))
    else:
        main()
