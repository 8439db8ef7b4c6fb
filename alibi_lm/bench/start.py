"""Time from the `deepspeed` command to the first optimizer step, beside a bare script's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from alibi_lm.bench.interleaved_timing import interleaved, markdown, paired_ratio, publish
from alibi_lm.train.data import open_training_data
from alibi_lm.train.engine.deepspeed_config import deepspeed_config
from alibi_lm.train.environment import free_port
from alibi_lm.train.monitoring.hardware import threads_per_rank
from alibi_lm.train.run import read_config
from alibi_lm.utils.errors import ConfigError, Problem

OURS, BARE = "ours", "bare"
_ONE_STEP = (
    "train.num_steps=1",
    "train.warmup_steps=0",
    "train.log_interval=1",
    "train.validation_interval=null",
)
"""What a run is given so that it does one step and says so."""


@dataclass(frozen=True)
class StartBenchmark:
    """What `benchmark_start` is to measure."""

    config: Path
    """YAML of the run; its data must have been prepared."""
    overrides: Sequence[str]
    num_ranks: int = 2
    repeats: int = 7
    """Pairs of starts."""


def benchmark_start(
    settings: StartBenchmark, cores: int, path: Path | None = None
) -> dict[str, Any]:
    """Start both in turns, say the result, and write it to `path`.

    The bare script has the model's layers, width, heads and vocabulary, the run's own DeepSpeed
    config and as many threads a rank. A first pair, which fills caches, is not counted.

    Args:
        settings: what is started.
        cores: cores that the ranks share.

    Raises:
        UserError: the config is wrong, or a process ended before its first step.
    """
    ranks = settings.num_ranks
    overrides = [*settings.overrides, *_ONE_STEP]
    config, block = read_config(settings.config, overrides, ranks)
    open_training_data(
        config
    )  # finds model.vocab_size, and what is wrong before anything is started
    data_ranks = ranks // (config.parallel.tp * config.parallel.pp)
    engine_config = deepspeed_config(config, block, data_ranks)
    shape = {
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_heads": config.model.num_heads,
        "vocab_size": config.model.vocab_size,
        "length": config.train.sequence_length,
        "threads": threads_per_rank(cores, ranks),
        "deepspeed": engine_config,
    }
    bare_script = [str(Path(__file__).with_name("bare.py")), json.dumps(shape)]
    numbers = count()
    with TemporaryDirectory() as folder:

        def ours() -> float:
            run = f"run.dir={folder}/run-{next(numbers)}"
            program = ["--module", "alibi_lm.train.entry", str(settings.config)]
            return seconds_until("step 1/1 ", launcher(ranks), [*program, *overrides, run])

        ways: dict[str, Callable[[], float]] = {
            OURS: ours,
            BARE: lambda: seconds_until("first step done", launcher(ranks), bare_script),
        }
        seconds = interleaved(ways, settings.repeats)
    result: dict[str, Any] = {
        "model": {name: value for name, value in shape.items() if name != "deepspeed"},
        "zero_stage": engine_config["zero_optimization"]["stage"],
        "ranks": ranks,
        "seconds": seconds,
        "ratio": paired_ratio(seconds[OURS], seconds[BARE]).as_dict(),
    }
    publish(result, benchmark_lines(result), path)
    return result


def launcher(num_ranks: int) -> list[str]:
    """The deepspeed command line up to the program."""
    program = str(Path(sys.executable).with_name("deepspeed"))
    options = ["--num_gpus", str(num_ranks), "--master_port", str(free_port())]
    return [sys.executable, program, *options]


def seconds_until(sign: str, command: Sequence[str], program: Sequence[str]) -> float:
    """Seconds from the start of a command until a line of its output begins with `sign`.

    Returns when the command has ended.

    Raises:
        ConfigError: it ended without such a line.
    """
    start = time.perf_counter()
    found: float | None = None
    last: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        [*command, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found is None and line.startswith(sign):
                found = time.perf_counter() - start
            last.append(line.strip())
    if found is None or process.returncode:
        rule = (
            f"ended with exit code {process.returncode} before its first step: {' / '.join(last)}"
        )
        raise ConfigError(Problem(program[0], None, rule, "see that it starts by itself"))
    return found


def benchmark_lines(result: dict[str, Any]) -> list[str]:
    """The result for the terminal, as a table."""
    model, ratio = result["model"], result["ratio"]
    rows = [[way, f"{median(result['seconds'][way]):.2f} s"] for way in (OURS, BARE)]
    return [
        f"from `deepspeed` to the first optimizer step: {result['ranks']} ranks, ZeRO stage "
        f"{result['zero_stage']}, {model['num_layers']} layers of {model['hidden_size']}, "
        f"{model['threads']} threads a rank; medians of {len(result['seconds'][OURS])} "
        f"interleaved repetitions",
        *markdown(["", "first step after"], rows),
        f"ratio {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
    ]
