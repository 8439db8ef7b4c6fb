"""Faults of a run's files, one after another in one process. Started by test_launch_faults.py.

Usage: fault_cases.py FOLDER FIRST_SEED NUM_CASES KIND... Ends with the line `ALL HELD` if all did.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml
from comparing import assert_same_states, curve
from launching import write_config

from alibi_lm.checkpoint.folder import LATEST, step_folders, verify
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.data.config import TokenizerConfig
from alibi_lm.data.preparation.tokenizer_training import train_tokenizer
from alibi_lm.train import entry
from alibi_lm.train.checkpointing import save
from alibi_lm.train.monitoring.metrics import Metrics
from alibi_lm.utils.errors import EXIT_USER_ERROR
from alibi_lm.utils.files import sha256
from alibi_lm.utils.logging import console

DONE, NUM_STEPS, INTERVAL = 8, 12, 2
FULL_DISK = "full disk"
MOMENTS = ("in training", "bytes in a save", "files", "before the start")

# Starts the run in a folder, with overrides: its exit code and what it wrote.
Start = Callable[..., tuple[int, str]]


def config_with_tokenizer(folder: Path) -> Path:
    """A small run of 12 steps, a checkpoint every 2, that keeps all and has a tokenizer."""
    folder.mkdir(parents=True)
    path = write_config(
        folder, num_steps=NUM_STEPS, checkpoint_interval=INTERVAL, keep_last=20, sequence_length=16
    )
    text = [f"line {number} of some text\n" for number in range(200)]
    settings = TokenizerConfig(kind="bpe", vocab_size=300)
    train_tokenizer(text, settings, folder / "tokenizer" / "tokenizer.model")
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    raw["data"]["tokenizer"] = str(folder / "tokenizer")
    raw["model"] |= {"hidden_size": 32, "num_heads": 4}
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def damage_file(path: Path, kind: str, chooser: random.Random) -> None:
    """Truncate a file, flip one of its bits, or delete it."""
    content = bytearray(path.read_bytes())
    if kind == "deletion":
        path.unlink()
    elif kind == "truncation":
        path.write_bytes(content[: chooser.randrange(len(content))])
    else:
        content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
        path.write_bytes(content)


@dataclass(frozen=True)
class Fault:
    """What was damaged in a run, and what must follow."""

    files: list[Path]
    """The damaged files; those of `named` are met, and named, by the next start."""
    named: list[Path]
    goes_on_from: str
    """Name of the newest step folder that is whole."""


def choose_and_damage(run: Path, kind: str, chooser: random.Random) -> Fault:
    """Damage a file of the newest checkpoint, `latest`, or files of several checkpoints."""
    root = run / "checkpoints"
    steps = [path.name for path in step_folders(run)]
    hits: list[list[int | str]] = [[-1], [-1], [-1], [-1, -2], [-2], [LATEST]]
    hit = chooser.choice(hits)
    files = []
    for place in hit:
        if isinstance(place, str):
            files.append(root / place)
        else:
            inside = sorted(p for p in (root / steps[place]).rglob("*") if p.is_file())
            # A shard is most of a checkpoint, but the small files must get their turn too.
            files.append(chooser.choice(inside))
    for path in files:
        damage_file(path, kind, chooser)
    broken = [steps[place] for place in hit if isinstance(place, int)]
    good = max(name for name in steps if name not in broken)
    named = [path for path in files if path.name == LATEST or step_of(path, root) > good]
    return Fault(files, named, good)


def step_of(path: Path, root: Path) -> str:
    """Name of the step folder that a checkpoint's file lies in."""
    return path.relative_to(root).parts[0]


def in_this_process(config: Path) -> Start:
    """Starts that do all that a process of launch/pretrain.py does, but in this one."""

    def start(run: Path, *overrides: str) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = entry.main([str(config), f"run.dir={run}", *overrides])
        return code, output.getvalue()

    return start


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every file of the checkpoints and of `latest`, by its path below them."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    names = {str(path.relative_to(root)): path for path in files}
    return {name: sha256(path) for name, path in names.items() if not name.startswith(".")}


def check_unharmed(before: dict[str, str], root: Path) -> None:
    """No file that was there has changed or gone, `latest` aside; damaged folders may be renamed.

    A folder found damaged is written anew when training comes by its step again, and is then kept
    under another name.
    """
    after = digests(root)
    for name, digest in before.items():
        folder, _, rest = name.partition("/")
        places = [name, *(f"{kept.name}/{rest}" for kept in root.glob(f"damaged_{folder}_*"))]
        assert name == LATEST or digest in [after.get(place) for place in places], name


def check_went_on(run: Path, whole: Path, code: int, output: str) -> None:
    """The run has ended as the undisturbed one: every step once, equal losses, equal bits."""
    assert code == 0, output
    assert [step for step, _, _ in curve(run)] == list(range(1, NUM_STEPS + 1))
    assert curve(run) == curve(whole)
    assert_same_states(whole, run, tolerance=0)
    assert verify(step_folders(run)[-1])["consumed_samples"] == NUM_STEPS * 8
    latest = run / "checkpoints" / LATEST
    assert latest.read_text(encoding="utf-8") == step_folders(run)[-1].name + "\n"


def check_named(fault: Fault, output: str) -> None:
    """The next start says which files are damaged, and which step it resumes from."""
    for path in fault.named:
        assert f"{path}: " in output, f"{path} not in:\n{output}"
    assert f"from {fault.goes_on_from} (" in output, output


def file_fault(kind: str, chooser: random.Random, base: Path, run: Path, start: Start) -> str:
    """One damage and the next start. Says what was damaged."""
    shutil.copytree(base, run)
    fault = choose_and_damage(run, kind, chooser)
    before = digests(run / "checkpoints")
    found = said_by_verify(run)
    for path in fault.files:
        assert path.name == LATEST or f"{path}: " in found, f"{path} not in:\n{found}"
    code, output = start(run)
    check_named(fault, output)
    check_unharmed(before, run / "checkpoints")
    check_went_on(run, base.parent / "whole", code, output)
    return ", ".join(str(path.relative_to(run)) for path in fault.files)


def said_by_verify(run: Path) -> str:
    """What `alibi-lm checkpoint verify` says."""
    from click.testing import CliRunner

    from alibi_lm.cli.main import main

    return CliRunner().invoke(main, ["checkpoint", "verify", str(run)]).output


def full_disk(
    chooser: random.Random, base: Path, run: Path, start: Start, moments: Sequence[str] = MOMENTS
) -> str:
    """The disk fills up at some moment of a start; room is made, and the run starts again."""
    shutil.copytree(base, run)
    before, disk = digests(run / "checkpoints"), run.parent
    how = chooser.choice(moments)
    if how == "files":
        spare = chooser.randrange(14)
        remount(disk, nr_inodes=os.statvfs(disk).f_files - os.statvfs(disk).f_ffree + spare)
        code, output = start(run)
        remount(disk, nr_inodes=100000)
    elif how == "before the start":
        spare = 4096 * chooser.randrange(8)
        fill(disk, spare)
        code, output = start(run)
    elif how == "in training":
        spare = 0
        with filling(disk, spare, Metrics, "log"):
            code, output = start(run)
    else:
        spare = 4096 * chooser.randrange(110)
        with filling(disk, spare, save, "_check_space"):
            code, output = start(run)
    assert code == EXIT_USER_ERROR, f"{how}, {spare}: exit {code}\n{output}"
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "make room" in line, line
    assert str(run) in line, line
    (disk / "filler").unlink(missing_ok=True)
    check_unharmed(before, run / "checkpoints")
    assert not list((run / "checkpoints").glob(".partial*")), output
    for folder in step_folders(run):
        verify(folder)
    newest = open_checkpoint(run).folder.name
    code, output = start(run)
    if newest == f"step_{NUM_STEPS:08d}":
        # Only the writing of `latest` has failed, which nothing depends on.
        assert "has already done its 12 steps" in output, output
        (run / "checkpoints" / LATEST).write_text(newest + "\n", encoding="utf-8")
    else:
        assert f"from {newest} (" in output, output
    check_unharmed(before, run / "checkpoints")
    check_went_on(run, base.parent / "whole", code, output)
    shutil.rmtree(run)
    return f"{how}, {spare} left: {line[:120]}"


def remount(disk: Path, nr_inodes: int) -> None:
    """Set how many files a tmpfs can hold."""
    options = f"remount,nr_inodes={nr_inodes}"
    subprocess.run(["mount", "-o", options, str(disk)], check=True)


def fill(disk: Path, spare: int) -> None:
    """Leave this many bytes (rounded to pages) of a disk free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "filler").open("ab") as file:
        if free > spare:
            os.posix_fallocate(file.fileno(), file.tell(), free - spare)


@contextlib.contextmanager
def filling(disk: Path, spare: int, owner: object, name: str) -> Iterator[None]:
    """Another job's files take the room away right after a function has been called."""
    function = getattr(owner, name)

    def call_and_fill(*arguments: object, **named: object) -> None:
        function(*arguments, **named)
        fill(disk, spare)

    with mock.patch.object(owner, name, call_and_fill):
        yield


def make_runs(folder: Path, start: Start) -> Path:
    """The undisturbed run, `whole`, and the one to be harmed, `base`, which is returned."""
    for name, steps in (("whole", NUM_STEPS), ("base", DONE)):
        code, output = start(folder / name, f"train.num_steps={steps}")
        assert code == 0, output
    return folder / "base"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 12 MB. Needs root."""
    folder.mkdir()
    options = "size=12m,nr_inodes=100000"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        console.close()
        subprocess.run(["umount", str(folder)], check=True)


def main(folder: Path, first: int, count: int, kinds: Sequence[str]) -> None:
    """Prepare the runs, then go through the seeds of each kind."""
    # DeepSpeed keeps the groups that it has made for the life of a process.
    entry.leave_process_group = console.close
    config = config_with_tokenizer(folder / "made")
    start = in_this_process(config)
    base = make_runs(folder, start)
    for kind in kinds:
        with small_disk(folder / "disk") if kind == FULL_DISK else nullcontext(folder) as where:
            for seed in range(first, first + count):
                run, chooser = where / f"case_{seed}", random.Random(f"{kind} {seed}")
                if kind == FULL_DISK:
                    said = full_disk(chooser, base, run, start)
                else:
                    said = file_fault(kind, chooser, base, run, start)
                sys.stdout.write(f"{kind} {seed}: {said}\n")
                sys.stdout.flush()
                shutil.rmtree(run, ignore_errors=True)
    sys.stdout.write("ALL HELD\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
