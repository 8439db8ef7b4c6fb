"""The hosts of a run, and commands run on all of them as DeepSpeed's launcher does."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.runner import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    EXPORT_ENVS,
    _parse_hostfile,
)

from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.logging import console

THIS = "this machine"
BOM = "\ufeff"
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_AT_ONCE = 64


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts and their slots, by the launcher's own reader.

    Raises:
        ConfigError: no such file, a line that the launcher does not take, or a host without slots.
    """
    if not path.is_file():
        raise ConfigError(Problem(str(path), None, "is no file", "name a hostfile"))
    fix = "write one line `NAME slots=RANKS` a host"
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    if text.startswith(BOM):
        console.warning(
            f"{path}: begins with a byte-order mark; DeepSpeed reads it as part of a name"
        )
    try:
        hosts = dict(_parse_hostfile(text.removeprefix(BOM).splitlines()))
    except ValueError as error:
        raise ConfigError(Problem(str(path), None, str(error), fix)) from None
    empty = [host for host, slots in hosts.items() if slots < 1]
    if empty:
        rule = f"gives {', '.join(empty)} no slots"
        raise ConfigError(Problem(str(path), None, rule, f"delete the line, or {fix}"))
    return hosts


def exported(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that the launcher passes to other hosts, PYTHONPATH as it sets it.

    Raises:
        ConfigError: the launcher cannot read a line of .deepspeed_env.
    """
    prefixes = (*EXPORT_ENVS, *get_accelerator().export_envs())
    passed = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    passed["PYTHONPATH"] = ":".join(paths)
    for place in DEEPSPEED_ENVIRONMENT_PATHS:
        path = Path(place) / DEEPSPEED_ENVIRONMENT_NAME
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if not equals:
                rule = "is not NAME=value; the launcher takes no comments and no empty lines"
                raise ConfigError(Problem(str(path), line, rule, "delete the line"))
            passed[name.strip()] = value.strip()
    return passed


@dataclass(frozen=True)
class Answer:
    """Output and exit code of a command on a host."""

    code: int
    output: str
    errors: str

    def exit_reason(self) -> str:
        """The last line of its errors, for a message."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


def run_everywhere(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    variables: Mapping[str, str],
    seconds: float,
) -> dict[str, Answer]:
    """Run each host's command on it, all at once, by ssh except for names of `local_name`."""

    def run(host: str) -> Answer:
        line = _shell_line(commands[host], folder, variables)
        command = ["sh", "-c", line] if host.startswith(THIS) else [*_SSH, host, line]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(124, "", f"no answer within {seconds:.0f} s")
        return Answer(done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(min(_AT_ONCE, len(commands))) as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


def local_name(rank: int) -> str:
    """A name of this machine for `run_everywhere`, one for each process on it."""
    return THIS if rank == 0 else f"{THIS}, rank {rank}"


def _shell_line(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    exports = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return f"cd {shlex.quote(str(folder))} && env {' '.join(exports)} {shlex.join(command)}"


def waits_for_ever(host: str) -> bool:
    """Whether ssh to this host never notices that the host is gone."""
    try:
        settings = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "serveraliveinterval 0" in settings.stdout.lower().splitlines()
