"""Ranks that are killed, stopped, stuck or defective: one line, and a next start that resumes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import (
    REPOSITORY,
    command,
    environment,
    launch,
    launch_and,
    metrics,
    write_config,
)

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import EXIT_LOST

HOST = socket.gethostname()
SETTINGS = {
    "num_steps": 100_000,
    "checkpoint_interval": 5,
    "keep_last": 100,
    "heartbeat_timeout_seconds": 8,
}

# Stands in for launch/pretrain.py, with a fault in one rank's reading of the data.
FAULTY = """
import os, sys, time
from alibi_lm.train.entry import run
from alibi_lm.train.data import TrainingData
good, start = TrainingData.micro_batches, []

def faulty(inputs, step, rank, num_ranks):
    start.append(step)
    if os.environ["RANK"] == "1" and step == start[0] + 4:
        {fault}
    return good(inputs, step, rank, num_ranks)

TrainingData.micro_batches = faulty
run(sys.argv[1:])
"""


def reaches(run: Path, more_steps: int) -> Callable[[], bool]:
    target = max((line["step"] for line in metrics(run)), default=0) + more_steps
    return lambda: max((line["step"] for line in metrics(run)), default=0) >= target


def lost_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def launch_faulty(folder: Path, config: Path, fault: str, *overrides: str) -> tuple[int, str]:
    script = folder / "faulty.py"
    script.write_text(FAULTY.format(fault=fault))
    line = command(script, str(config))
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*line, *overrides],
        env=environment() | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert sys.executable in line[0]
    return done.returncode, done.stdout


def test_a_killed_a_stopped_and_a_stuck_rank_each_end_the_job_with_one_line(
    tmp_path: Path,
) -> None:
    config, run = write_config(tmp_path, **SETTINGS), tmp_path / "run"
    log = run / "train.log"

    def pause_then_kill(pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(3)
        os.kill(pids[1], signal.SIGCONT)
        goes_on, give_up = reaches(run, 3), time.monotonic() + 60
        while not goes_on():
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        os.kill(pids[1], signal.SIGKILL)

    code, output = launch_and(config, when=reaches(run, 6), then=pause_then_kill)
    (line,) = lost_lines(output)
    assert line.startswith(f"error: rank 1 on {HOST}: died without an error")
    assert re.search(r"while the job was at step \d+;", line)
    assert "last checkpoint" in line
    assert "Traceback" not in output
    assert code not in (0, 2, 3, 4)
    assert line.removeprefix("error: ") in log.read_text()

    def stop(pids: list[int]) -> None:
        os.kill(pids[0], signal.SIGSTOP)
        give_up = time.monotonic() + 60
        while f"rank 0 on {HOST}: sent no heartbeat" not in log.read_text():
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)  # the launcher would wait 30 s for it

    code, output = launch_and(config, when=reaches(run, 6), then=stop)
    (line,) = lost_lines(output)
    assert "resume" in output
    assert line.startswith(f"error: rank 0 on {HOST}: sent no heartbeat for 8 s")
    assert re.search(r"while the job was at step \d+;", line)
    assert "Traceback" not in output

    before = open_checkpoint(run).step
    code, output = launch_faulty(
        tmp_path, config, "time.sleep(1000)", "train.hang_timeout_minutes=0.1", "train.keep_last=99"
    )
    (line,) = lost_lines(output)
    assert line.startswith(f"error: rank 1 on {HOST}: makes no progress: stuck for 6 s at step ")
    assert f"at step {before + 5}, reading data; the other ranks wait" in line
    assert "Traceback" not in output
    assert code == EXIT_LOST

    end = before + 5
    done = launch(config, f"train.num_steps={end}")
    assert open_checkpoint(run).step == end
    assert "resume" in done.stdout
    assert [entry["step"] for entry in metrics(run)] == list(range(1, end + 1))


@pytest.mark.slow
def test_a_defect_keeps_its_traceback_and_is_named_by_the_others(tmp_path: Path) -> None:
    config = write_config(tmp_path, **SETTINGS)
    code, output = launch_faulty(tmp_path, config, "raise ValueError('a defect')")
    assert output.count("Traceback") == 1
    assert "ValueError: a defect" in output
    (line,) = lost_lines(output)
    assert line.startswith(f"error: rank 1 on {HOST}: failed with a defect at step 5")
    assert "ValueError: a defect" in line
    assert code != 0
