"""The process that a launcher starts: reads its environment, then trains."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from alibi_lm.train.environment import launcher_environment
from alibi_lm.utils.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from alibi_lm.utils.exit import leave, leave_process_group, run_and_report
from alibi_lm.utils.logging import console
from alibi_lm.utils.memory import keep_freed_memory
from alibi_lm.utils.utf8 import ensure_utf8


def main(arguments: Sequence[str]) -> int:
    """Parse a training command line, run it on this rank, and return the exit code.

    0: all steps done. 2: user error. 3: loss not finite. 4: asked to stop, and saved. With 5, a
    rank or host lost, the watchdog ends the process (see `utils.exit`).
    """
    parser = _Parser(
        prog=_command_name(), description="Start a run, or resume it from its last checkpoint."
    )
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that override the file",
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_intermixed_args(arguments)
    interrupted = "interrupted; re-run the same command to resume from the last checkpoint"
    try:
        return run_and_report(lambda: _train(parsed), interrupted, watched=True)
    finally:
        leave_process_group()


def _train(parsed: argparse.Namespace) -> int:
    os.environ.update(launcher_environment(os.environ, parsed.local_rank))
    console.muted = int(os.environ["RANK"]) != 0
    quiet_libraries()
    share_cores()
    keep_freed_memory()

    # Imported here: DeepSpeed picks its accelerator and log level from the environment.
    from alibi_lm.train.run import pretrain

    local_rank, address = int(os.environ["LOCAL_RANK"]), os.environ["MASTER_ADDR"]
    finished = pretrain(parsed.config, parsed.overrides, local_rank, address)
    return 0 if finished else EXIT_STOPPED


class _Parser(argparse.ArgumentParser):
    """Reports a mistake on one line, on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        with suppress(UserError):
            place = {**os.environ, **launcher_environment(os.environ, 0)}
            console.muted = int(place["RANK"]) != 0
        console.error(f"{self.prog}: {message}; see `{self.prog} --help`")
        sys.exit(EXIT_USER_ERROR)


def _command_name() -> str:
    script = os.path.basename(sys.argv[0])
    return "python -m alibi_lm.train.entry" if script == "entry.py" else script


def quiet_libraries() -> None:
    """Silence log lines and warnings of the libraries that a user cannot act on."""
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    threading.excepthook = _thread_failed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed")
    # Pipeline stages send tensors that require a gradient, which does not flow back that way.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    # Only tables of positions are cached: recomputing them changes nothing.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a .functools.lru_cache")


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Report an uncaught exception of a thread, as the interpreter does.

    TensorBoard's writer is left out: its error is re-raised on the next call and reported there.
    """
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def share_cores() -> None:
    """Divide the cores among the ranks of this host, unless OMP_NUM_THREADS is set."""
    import torch

    from alibi_lm.train.monitoring.hardware import threads_per_rank

    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(threads_per_rank(len(os.sched_getaffinity(0)), ranks))


def run(arguments: Sequence[str]) -> NoReturn:
    """Train and end the process with `main`'s exit code."""
    ensure_utf8()
    leave(main(arguments))


if __name__ == "__main__":
    run(sys.argv[1:])
