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
from alibi_lm.utils.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError, path_error
from alibi_lm.utils.logging import console
from alibi_lm.utils.memory import keep_freed_memory


def main(arguments: Sequence[str]) -> int:
    """Parse a training command line, run it on this rank, and return the exit code.

    0: done. 2: a mistake of the user's. 3: a loss that is not finite. 4: asked to stop, and saved.
    With 5, a rank or host lost, the process ends itself (`watchdog`).
    """
    parser = argparse.ArgumentParser(
        prog="pretrain.py", description="Start a run, or go on with it from its last checkpoint."
    )
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that take precedence over the file",
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_intermixed_args(arguments)
    try:
        os.environ.update(launcher_environment(os.environ, parsed.local_rank))
    except UserError as error:
        console.error(str(error))
        return error.exit_code
    console.muted = int(os.environ["RANK"]) != 0
    quiet_libraries()
    share_cores()
    keep_freed_memory()

    # Imported here: DeepSpeed picks its accelerator and log level from the environment.
    from alibi_lm.train.run import pretrain

    try:
        local_rank, address = int(os.environ["LOCAL_RANK"]), os.environ["MASTER_ADDR"]
        finished = pretrain(parsed.config, parsed.overrides, local_rank, address)
    except UserError as error:
        console.error(str(error))
        if error.raised_on_all_ranks:
            _wait_for_rank_0()
        return error.exit_code
    except OSError as error:
        mistake = path_error(error)
        if mistake is None:
            raise
        console.muted = False  # it may be this rank's own
        console.error(str(mistake))
        return mistake.exit_code
    except KeyboardInterrupt:
        console.error("interrupted; the same command goes on from the last checkpoint")
        return EXIT_INTERRUPTED
    finally:
        _leave()
    return 0 if finished else EXIT_STOPPED


def quiet_libraries() -> None:
    """Leave out what the libraries say of themselves."""
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    threading.excepthook = _thread_failed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed")
    # A pipeline stage sends a tensor that has a gradient; nothing is meant to flow back that way.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    # What is cached here are tables of positions: the same whether they are kept or made again.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a .functools.lru_cache")


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Report an uncaught exception of a thread, as the interpreter does.

    TensorBoard's writer is left out: its error is re-raised on the next call and reported there.
    """
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def share_cores() -> None:
    """Give each rank of this host its share of the cores, unless the user has said how many."""
    import torch

    from alibi_lm.train.monitoring.hardware import threads_per_rank

    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(threads_per_rank(len(os.sched_getaffinity(0)), ranks))


def _wait_for_rank_0() -> None:
    """The launcher ends all ranks when the first one leaves: let rank 0 write its line before."""
    import torch.distributed as dist

    dist.barrier()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def run(arguments: Sequence[str]) -> NoReturn:
    """`main` as a process: ends it with main's exit code.

    The process ends without the interpreter's own shutdown: native threads of the communication
    libraries now and then abort in it, and a launcher would take the finished run for a failed
    one. By then every file is closed and synced.
    """
    code = main(arguments)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # a launcher that was ended no longer reads
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
