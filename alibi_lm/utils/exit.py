"""How a process ends: one line, an exit code, and no interpreter shutdown.

A training process ends in one of these ways, each with its exit code (`utils.errors`):

- **All steps done** (0), or **asked to stop** (4): SIGTERM or SIGUSR1 only sets a flag
  (`train.fault_tolerance.preemption`). The ranks exchange it with the loss of every step, so that
  all stop after the same one; the training loop saves a checkpoint and returns.
- **A user error** (2) or a loss that is not finite (3): raised through the training loop to
  `run_and_report`, which prints it on one line.
- **A rank that died, hangs or fails alone** (5, or that rank's own code): the watchdog's thread
  prints the line and ends the process (`end_now`), because the main thread may be in a collective
  that never returns.

The first two leave through `leave`. Evals on several ranks do the same without a watchdog.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from alibi_lm.utils.errors import EXIT_INTERRUPTED, UserError, path_error
from alibi_lm.utils.logging import console

AGREEMENT_TIMEOUT = timedelta(seconds=30)
"""Time in which the other ranks reach the same error."""


def run_and_report(work: Callable[[], int], interrupted: str, *, watched: bool) -> int:
    """Run a rank's work; print its error, if any, on one line and return the exit code.

    Args:
        work: returns its exit code, or raises.
        interrupted: what to print at Ctrl-C.
        watched: whether a watchdog reports to the other ranks an error that only this one has.
    """
    try:
        return work()
    except UserError as error:
        return _report(error, wait=error.raised_on_all_ranks or not watched)
    except OSError as failure:
        disk_error = path_error(failure)
        if disk_error is None:
            raise
        if watched:
            console.muted = False  # the error may be this rank's alone
        return _report(disk_error, wait=not watched)
    except KeyboardInterrupt as interrupt:
        console.critical(str(interrupt) or interrupted)
        return EXIT_INTERRUPTED


def _report(error: UserError, *, wait: bool) -> int:
    """Print an error and return its exit code. Every other rank than 0 is muted.

    The launcher kills all ranks when the first one ends, so they `wait` for rank 0's line. A rank
    for which no other waits has an error of its own, and prints it.
    """
    import torch.distributed as dist

    console.error(str(error))
    if wait and dist.is_initialized():
        try:
            dist.barrier(async_op=True).wait(AGREEMENT_TIMEOUT)
        except RuntimeError:
            if console.muted:
                console.muted = False
                console.error(str(error))
    return error.exit_code


def leave_process_group() -> None:
    """Close this process's connections to the other ranks, if it has any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End the process with an exit code, all output written.

    The interpreter does not shut down: native threads of the communication libraries now and then
    abort in that, and a launcher would take a finished run for a failed one. By then every file is
    closed and synced.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # the launcher may have ended
            stream.flush()
    end_now(code)


def end_now(code: int) -> NoReturn:
    """End the process at once, whatever its threads are doing."""
    os._exit(code)
