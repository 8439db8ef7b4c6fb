"""Kills, damaged files and full disks: the next start resumes from a checkpoint that is whole."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from comparing import assert_same_states, curve, reaches
from fault_cases import (
    FULL_DISK,
    MOMENTS,
    Start,
    check_unharmed,
    config_with_tokenizer,
    digests,
    file_fault,
    fill,
    full_disk,
    make_runs,
    small_disk,
)
from launching import (
    PRETRAIN,
    RECORDING,
    REPOSITORY,
    command,
    environment,
    launch,
    launch_and,
    launcher_of,
    ranks_of,
    write_config,
)

from alibi_lm.checkpoint.folder import step_folders, verify
from alibi_lm.utils.errors import EXIT_USER_ERROR

FILE_FAULTS = ["truncation", "bit flip", "deletion"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
slow = pytest.mark.slow


# ---- kills --------------------------------------------------------------------------------------


def ranks_have_started() -> bool:
    """Whether a launcher that this process started has started its two ranks."""
    try:
        return len(ranks_of(os.getpid())) == 2
    except (psutil.Error, KeyError):  # a process that ends, or has not begun
        return False


def moment(run: Path, chooser: random.Random) -> tuple[str, Callable[[], bool], float]:
    """When to kill: what must have happened, and for how many seconds more to wait."""

    further = reaches(run, 1)

    def saving() -> bool:
        # What the last kill left is gone by the time that a further step is done.
        return further() and any((run / "checkpoints").glob(".partial_step_*/*"))

    what = chooser.choice(["in a save", "in a save", "in training", "in training", "at the start"])
    if what == "in a save":
        return what, saving, chooser.uniform(0, 0.02)
    if what == "in training":
        return what, reaches(run, chooser.randint(1, 6)), chooser.uniform(0, 0.05)
    return what, ranks_have_started, chooser.uniform(0, 8)


def start_and_kill(config: Path, run: Path, chooser: random.Random) -> str:
    """One start, and the kill of one rank (or of all that was started) at some moment of it."""
    what, when, wait = moment(run, chooser)
    victim = chooser.choice(["rank 0", "rank 1", "all"])

    def kill(pids: list[int]) -> None:
        time.sleep(wait)
        if victim == "all":
            pids = [launcher_of(pids), *pids]
        for pid in pids if victim == "all" else [pids[int(victim[-1])]]:
            os.kill(pid, signal.SIGKILL)

    root = run / "checkpoints"
    before = digests(root)
    newest = step_folders(run)[-1].name if step_folders(run) else None
    started = time.monotonic()
    code, output = launch_and(config, when=when, then=kill)
    # The launcher of a killed launcher takes it for done.
    assert code != 0 or victim == "all", output
    check_unharmed(before, root)
    for folder in step_folders(run):
        verify(folder)
    if f"resume {run}" in output:
        assert f"from {newest} (" in output
    return f"{what}, {victim}: {time.monotonic() - started:.0f} s"


@pytest.mark.parametrize(("num_kills", "seed"), [(2, 1), pytest.param(20, 20, marks=slow)])
def test_kills_of_any_rank_at_any_time_end_in_the_same_bits(
    num_kills: int, seed: int, tmp_path: Path
) -> None:
    num_steps, chooser = 20 * num_kills, random.Random(seed)
    settings = {"num_steps": num_steps, "checkpoint_interval": 5, "keep_last": 1000}
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, killed):
        folder.mkdir()
    config, run = write_config(killed, **settings), killed / "run"
    for _ in range(num_kills):
        sys.stdout.write(start_and_kill(config, run, chooser) + "\n")
    last = launch(config)
    assert f"from {step_folders(run)[-1].name} (" in last.stdout or "resume" in last.stdout
    launch(write_config(undisturbed, **settings))
    assert curve(run) == curve(undisturbed / "run")
    assert [step for step, _, _ in curve(run)] == list(range(1, num_steps + 1))
    assert_same_states(undisturbed / "run", run, tolerance=0)
    assert verify(step_folders(run)[-1])["consumed_samples"] == num_steps * 8
    assert not list((run / "checkpoints").glob(".partial*"))


# ---- damaged files and full disks, in one process -----------------------------------------------


def hold_in_one_process(folder: Path, count: int, *kinds: str) -> None:
    """Cases 0 to `count` of each kind, all in one process that is not this one."""
    script = str(REPOSITORY / "tests/launch/helpers/fault_cases.py")
    done = subprocess.run(
        [sys.executable, script, str(folder), "0", str(count), *kinds],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ALL HELD\n")


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=slow)])
def test_damaged_files_are_named_and_training_goes_on(count: int, tmp_path: Path) -> None:
    hold_in_one_process(tmp_path, count, *FILE_FAULTS)


@needs_root
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=slow)])
def test_a_disk_that_fills_up_harms_nothing(count: int, tmp_path: Path) -> None:
    hold_in_one_process(tmp_path, count, FULL_DISK)


# ---- the same through the launchers -------------------------------------------------------------


def by_deepspeed(config: Path) -> Start:
    """Starts of two ranks by the `deepspeed` command."""

    def start(run: Path, *overrides: str) -> tuple[int, str]:
        return ended(command(PRETRAIN, str(config), f"run.dir={run}", *overrides))

    return start


def by_alibi_lm(config: Path) -> Start:
    """Starts of two ranks by `alibi-lm train`."""

    def start(run: Path, *overrides: str) -> tuple[int, str]:
        train = [sys.executable, "-m", "alibi_lm", "train", str(config), f"run.dir={run}"]
        return ended([*train, *overrides, "--num-ranks", "2"])

    return start


def ended(line: list[str]) -> tuple[int, str]:
    """Exit code and output of a command."""
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


@slow
def test_file_faults_through_the_launchers(tmp_path: Path) -> None:
    config = config_with_tokenizer(tmp_path / "made")
    base = make_runs(tmp_path, by_deepspeed(config))
    for kind in FILE_FAULTS:
        for seed, start in enumerate([by_deepspeed, by_deepspeed, by_alibi_lm]):
            run = tmp_path / f"{kind}_{seed}"
            chooser = random.Random(f"launched {kind} {seed}")
            sys.stdout.write(file_fault(kind, chooser, base, run, start(config)) + "\n")


@slow
@needs_root
def test_full_disks_through_the_launcher(tmp_path: Path) -> None:
    config = config_with_tokenizer(tmp_path / "made")
    start = by_deepspeed(config)
    base = make_runs(tmp_path, start)
    with small_disk(tmp_path / "disk") as disk:
        for seed in range(3):
            chooser = random.Random(f"launched full disk {seed}")
            said = full_disk(chooser, base, disk / f"case_{seed}", start, MOMENTS[2:])
            sys.stdout.write(said + "\n")


@slow
@needs_root
def test_a_disk_that_fills_up_between_saves_ends_every_rank_alike(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_steps=5000, checkpoint_interval=5000)
    with small_disk(tmp_path / "disk") as disk:
        run = disk / "run"
        code, output = launch_and(
            config,
            f"run.dir={run}",
            when=reaches(run, 3),
            then=lambda _: fill(disk, 0),
            program=RECORDING,
        )
        assert code == EXIT_USER_ERROR, output
        assert [(tmp_path / f"exit_{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
        assert "Traceback" not in output
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert line == f"error: {run}: cannot be used (No space left on device); " + (
            "make room, or name another path"
        )
