"""Starting small runs, in forked ranks or by the real `deepspeed` command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from forked import Forked, rank_commands
from ports import unused_port

from alibi_lm.config_loading import to_yaml
from alibi_lm.data.indexed import TokenFileWriter

REPOSITORY = Path(__file__).parents[3]
VOCAB_SIZE = 320


def write_corpus(prefix: Path, num_documents: int = 40, seed: int = 0) -> Path:
    """A token file with something to learn: each document walks an own short cycle of ids."""
    rng = np.random.default_rng(seed)
    writer = TokenFileWriter(prefix, np.uint16)
    for _ in range(num_documents):
        cycle = rng.integers(4, VOCAB_SIZE, size=int(rng.integers(5, 40)))
        length = int(rng.integers(200, 1200))
        writer.add_document([*np.resize(cycle, length).tolist(), 1])
    writer.finish()
    return prefix


def write_config(folder: Path, **train: Any) -> Path:
    """A config of a small fp32 run under `folder`, with its own corpus."""
    corpus = write_corpus(folder / "corpus")
    config = {
        "run": {"dir": str(folder / "run")},
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "vocab_size": VOCAB_SIZE,
        },
        "data": {"corpora": [{"prefix": str(corpus)}], "validation": [str(corpus)]},
        "train": {
            "sequence_length": 64,
            "num_steps": 10,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "precision": "fp32",
            "schedule": "constant",
            "learning_rate": 3e-3,
            "log_interval": 1,
            "checkpoint_interval": 5,
        }
        | train,
        "deepspeed": {"zero_optimization": {"stage": 1}},
    }
    path = folder / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return path


PRETRAIN = REPOSITORY / "launch" / "pretrain.py"
RECORDING = Path(__file__).with_name("recording.py")


def command(program: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The command line that starts `ranks` ranks of a script."""
    script = [str(program), *arguments]
    if ranks == 0:
        return [sys.executable, *script]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    port = str(unused_port())
    return [sys.executable, launcher, "--num_gpus", str(ranks), "--master_port", port, *script]


def environment() -> dict[str, str]:
    """One thread a rank: the ranks share the machine's cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def launch(
    config: Path, *overrides: str, ranks: int = 2, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Train to the end in forked ranks; `ranks` 0 is a process that nobody launched.

    Fails unless it exits with `code`. `launch_by_deepspeed` starts the real command.
    """
    return finished(start_forked(PRETRAIN, str(config), *overrides, ranks=ranks), code)


def launch_by_deepspeed(
    config: Path, *overrides: str, ranks: int = 2, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """The same by the `deepspeed` command; `ranks` 0 starts plain python."""
    return finished(start_by_deepspeed(PRETRAIN, str(config), *overrides, ranks=ranks), code)


def start_by_deepspeed(program: Path, *arguments: str, ranks: int = 2) -> subprocess.Popen[str]:
    """Start a script by the `deepspeed` command; `ranks` 0 starts plain python."""
    return started(command(program, *arguments, ranks=ranks))


def started(line: list[str]) -> subprocess.Popen[str]:
    """Start a command, its output and errors to be read."""
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environment(), stdout=pipe, stderr=pipe, text=True)


def start_forked(program: Path, *arguments: str, ranks: int = 2, merged: bool = False) -> Forked:
    """Start a script in forked ranks; `ranks` 0 is a process that nobody launched."""
    if ranks == 0:
        return Forked([([str(program), *arguments], environment())], merged=merged)
    return Forked(rank_commands(program, arguments, environment(), ranks), merged=merged)


def alibi_lm(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `alibi-lm ARGUMENTS` in a forked process; fails unless it exits with `code`."""
    return finished(Forked([(["-m", "alibi_lm", *map(str, arguments)], environment())]), code)


def finished(
    process: Forked | subprocess.Popen[str], code: int = 0, seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    """Wait for the end, which must come in this time and with this exit code."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == code, f"exit {process.returncode}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(process.args, code, stdout, stderr)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started, in order of their rank."""
    found = {}
    for child in psutil.Process(launcher).children(recursive=True):
        line = child.cmdline()
        if any(part.startswith("--local_rank=") for part in line) and "-m" not in line:
            found[child.environ()["RANK"]] = child.pid
    return [found[rank] for rank in sorted(found)]


def launcher_of(ranks: list[int]) -> int:
    """Process id of the node's launcher, `python -m deepspeed.launcher.launch`."""
    parent = psutil.Process(ranks[0]).parent()
    assert parent is not None
    assert "deepspeed.launcher.launch" in parent.cmdline()
    return parent.pid


def launch_and(
    config: Path,
    *overrides: str,
    when: Callable[[], bool],
    then: Callable[[list[int]], None],
    ranks: int = 2,
    program: Path = PRETRAIN,
    forked: bool = False,
) -> tuple[int, str]:
    """Start ranks and, as soon as `when` is true, call `then` with the ranks' process ids.

    Returns:
        The exit code and what was printed.
    """
    if forked:
        job = start_forked(program, str(config), *overrides, ranks=ranks, merged=True)
        return watched_until(job, when, lambda: then(job.pids()))
    line = command(program, str(config), *overrides, ranks=ranks)
    return run_until(line, environment(), when, lambda pid: then(ranks_of(pid)))


def run_until(
    line: list[str],
    variables: dict[str, str],
    when: Callable[[], bool],
    then: Callable[[int], None],
) -> tuple[int, str]:
    """Start a command and, as soon as `when` is true, call `then` with its process id.

    Returns:
        The exit code and what was printed.
    """
    process = subprocess.Popen(
        line,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return watched_until(process, when, lambda: then(process.pid))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def watched_until(
    process: Forked | subprocess.Popen[str], when: Callable[[], bool], then: Callable[[], None]
) -> tuple[int, str]:
    """Wait until `when` is true, call `then`, and wait for the end: exit code and output."""
    give_up = time.monotonic() + 600
    try:
        while not when():
            assert process.poll() is None, f"ended too early:\n{process.communicate(timeout=60)[0]}"
            assert time.monotonic() < give_up, "the moment never came"
            time.sleep(0.0005)
        then()
        output = process.communicate(timeout=600)[0]
    finally:
        if isinstance(process, Forked):
            process.kill()
    assert process.returncode is not None
    return process.returncode, output


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a line that a kill cut short counts as none."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the program itself (not the launcher) wrote as errors."""
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]
