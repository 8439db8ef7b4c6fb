"""Time from the `deepspeed` command to the first optimizer step, relative to a bare script.

python tests/benchmarks/startup_time.py CONFIG [key=value ...] [--num-ranks 2] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish
from alibi_lm.train.data import open_training_data
from alibi_lm.train.engine.deepspeed_config import deepspeed_config
from alibi_lm.train.environment import free_port
from alibi_lm.train.monitoring.hardware import threads_per_rank
from alibi_lm.train.run import read_config

BASELINE = Path(__file__).with_name("startup_baseline.py")
_ONE_STEP = (
    "train.num_steps=1",
    "train.warmup_steps=0",
    "train.log_interval=1",
    "train.validation_interval=null",
)
"""Overrides that end a run after one logged step."""


@dataclass(frozen=True)
class StartBenchmark:
    """Settings of `benchmark_start`."""

    config: Path
    """YAML of the run; its data must have been prepared."""
    overrides: Sequence[str]
    num_ranks: int = 2
    repeats: int = 7


def benchmark_start(settings: StartBenchmark, path: Path | None = None) -> dict[str, Any]:
    """Start both, interleaved, print the result, and write it to `path`.

    The baseline has the model's layers, width, heads and vocabulary, the run's own DeepSpeed
    config and as many threads a rank. A first pair, which fills caches, does not count.

    Raises:
        UserError: the config is wrong.
        RuntimeError: a process ended before its first step.
    """
    ranks = settings.num_ranks
    overrides = [*settings.overrides, *_ONE_STEP]
    config, block = read_config(settings.config, overrides, ranks)
    open_training_data(config)  # fills in model.vocab_size, and checks the data
    data_ranks = ranks // (config.parallel.tp * config.parallel.pp)
    engine_config = deepspeed_config(config, block, data_ranks)
    model = {
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_heads": config.model.num_heads,
        "vocab_size": config.model.vocab_size,
        "length": config.train.sequence_length,
        "threads": threads_per_rank(len(os.sched_getaffinity(0)), ranks),
    }
    baseline = [str(BASELINE), json.dumps(model | {"deepspeed": engine_config})]
    numbers = count()
    with TemporaryDirectory() as folder:

        def ours() -> float:
            run = f"run.dir={folder}/run-{next(numbers)}"
            program = ["--module", "alibi_lm.train.entry", str(settings.config)]
            return seconds_until("step 1/1 ", ranks, [*program, *overrides, run])

        def bare() -> float:
            return seconds_until("first step done", ranks, baseline)

        seconds = interleaved({"ours": ours, "baseline": bare}, settings.repeats)
    result: dict[str, Any] = {
        "model": model,
        "zero_stage": engine_config["zero_optimization"]["stage"],
        "ranks": ranks,
        "seconds": seconds,
        "ratio": paired_ratio(seconds["ours"], seconds["baseline"]).as_dict(),
    }
    publish(result, benchmark_lines(result), path)
    return result


def seconds_until(mark: str, num_ranks: int, program: Sequence[str]) -> float:
    """Seconds from starting a program under deepspeed to a line that begins with `mark`.

    Returns when the command has ended.

    Raises:
        RuntimeError: it ended without such a line.
    """
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    options = ["--num_gpus", str(num_ranks), "--master_port", str(free_port())]
    command = [sys.executable, launcher, *options, *program]
    start = time.perf_counter()
    seconds: float | None = None
    last: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if seconds is None and line.startswith(mark):
                seconds = time.perf_counter() - start
            last.append(line.strip())
    if seconds is None or process.returncode:
        raise RuntimeError(
            f"{program[0]} ended with exit code {process.returncode} before its first step: "
            f"{' / '.join(last)}"
        )
    return seconds


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    model, ratio, seconds = result["model"], result["ratio"], result["seconds"]
    rows = [[name, f"{median(values):.2f} s"] for name, values in seconds.items()]
    return [
        f"from `deepspeed` to the first optimizer step: {result['ranks']} ranks, ZeRO stage "
        f"{result['zero_stage']}, {model['num_layers']} layers of {model['hidden_size']}, "
        f"{model['threads']} threads a rank; medians of {len(seconds['ours'])} interleaved "
        f"measurements",
        *markdown(["", "first step after"], rows),
        f"ratio {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
    ]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--num-ranks", type=click.IntRange(1), default=2)
@click.option("--repeats", type=click.IntRange(1), default=7)
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(
    config: Path, overrides: Sequence[str], num_ranks: int, repeats: int, path: Path | None
) -> None:
    """Start the run of CONFIG and the baseline; CONFIG's run folder is not touched."""
    benchmark_start(StartBenchmark(config, list(overrides), num_ranks, repeats), path)


if __name__ == "__main__":
    main()
