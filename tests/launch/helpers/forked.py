"""Scripts run by processes that are forked from one that has imported torch and DeepSpeed.

A start of two ranks by the `deepspeed` command imports them five times, which takes longer than
what most tests do with the ranks. A forked rank is a new process all the same: its arguments,
environment, output, process group and exit code are its own. Where the launcher itself is what a
test is about, the real command is started (launching.py).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from ports import unused_port

_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["__main__", "preloaded"])

Command = tuple[list[str], dict[str, str]]
"""Arguments of `python` (a script's path, or -m and a module, and theirs), and environment."""


def _become(arguments: list[str], variables: dict[str, str], output: str, errors: str) -> None:
    """Be `python ARGUMENTS` from here on: a script, or `-m` and a module."""
    os.environ.clear()
    os.environ.update(variables)
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


class Forked:
    """The running ranks of one job, with what tests use of `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, commands: Sequence[Command], *, merged: bool = False) -> None:
        """Start one process for each command; `merged` puts errors among the output."""
        self.args = commands[0][0]
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        self._errors = self._output if merged else Path(self._folder.name, "errors")
        for path in (self._output, self._errors):
            path.touch()
        with _importing_from_here():
            self.ranks = [self._start(*each) for each in commands]

    def _start(self, arguments: list[str], variables: dict[str, str]) -> ForkServerProcess:
        given = (arguments, variables, str(self._output), str(self._errors))
        process = _SERVER.Process(target=_become, args=given)
        process.start()
        return process

    def pids(self) -> list[int]:
        """Process ids in order of the ranks."""
        return [rank.pid for rank in self.ranks if rank.pid is not None]

    def poll(self) -> int | None:
        """The exit code, or None as long as all run."""
        codes = [rank.exitcode for rank in self.ranks]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end of all ranks; output and errors.

        As DeepSpeed's launcher does, which looks once a second, the ranks that are left a second
        after one has failed are asked to end, and killed if they do not.

        Raises:
            subprocess.TimeoutExpired: they take longer than `timeout` seconds.
        """
        give_up = time.monotonic() + timeout
        while self.poll() is None:
            connection.wait(self._running(), give_up - time.monotonic())
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = self.poll()
        if not self._end_within(1):
            for rank in self.ranks:
                rank.terminate()
            self._end_within(30)
        self.kill()
        with self._folder:
            return self._output.read_text(), self._errors.read_text()

    def kill(self) -> None:
        """Kill what still runs."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def _running(self) -> list[int]:
        return [rank.sentinel for rank in self.ranks if rank.exitcode is None]

    def _end_within(self, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while running := self._running():
            if time.monotonic() > give_up:
                return False
            connection.wait(running, give_up - time.monotonic())
        return True


def _importing_from_here() -> mock._patch_dict:
    """The server, which the first start begins, finds this folder's modules and the library."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[2])])
    return mock.patch.dict(os.environ, PYTHONPATH=paths)


def rank_commands(
    program: Path, arguments: Sequence[str], variables: Mapping[str, str], num_ranks: int
) -> list[Command]:
    """What DeepSpeed's launcher starts on one host."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
    }
    return [
        (
            [str(program), f"--local_rank={rank}", *arguments],
            {**variables, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
