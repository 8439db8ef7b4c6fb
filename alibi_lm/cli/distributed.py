"""Commands that one process runs alone, and the ranks of a launcher run together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from alibi_lm.utils.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    Problem,
    UserError,
    path_error,
)
from alibi_lm.utils.logging import console

AGREEMENT_TIMEOUT = timedelta(seconds=30)
"""Time within which all ranks come to the same error."""

if TYPE_CHECKING:
    from alibi_lm.evals.config import SuiteConfig
    from alibi_lm.evals.models.sharded import EvalRanks


def on_ranks(
    read: Callable[[], SuiteConfig], work: Callable[[SuiteConfig, EvalRanks], None], local_rank: int
) -> None:
    """Do `work` in this process, or as one of the ranks that a launcher has started.

    Rank 0 alone writes and prints. With several ranks the process ends here, with its exit code.

    Args:
        read: gives the settings, of which `parallel.tp` says how many ranks share a model.
        work: what is done by every rank.
        local_rank: as `deepspeed` gives it.

    Raises:
        UserError: as `read` and `work`, with one process.
    """
    from alibi_lm.evals.models.sharded import ONE_PROCESS
    from alibi_lm.train.environment import launcher_environment

    # A batch script of Slurm has the job's variables too, but only srun starts ranks.
    steps = "SLURM_STEP_ID" in os.environ
    seen = {k: v for k, v in os.environ.items() if steps or not k.startswith("SLURM_")}
    added = launcher_environment(seen, local_rank)
    if int(added.get("WORLD_SIZE") or seen.get("WORLD_SIZE", "1")) > 1:
        os.environ.update(added)
        _end(_one_of_several(read, work))
    suite = read()
    if suite.parallel.tp > 1:
        rule = "shares the model among ranks, and this is one process"
        fix = f"start `deepspeed --num_gpus {suite.parallel.tp} --module alibi_lm eval ...`"
        raise ConfigError(Problem("parallel.tp", suite.parallel.tp, rule, fix))
    work(suite, ONE_PROCESS)


def _one_of_several(
    read: Callable[[], SuiteConfig], work: Callable[[SuiteConfig, EvalRanks], None]
) -> int:
    """This rank's exit code."""
    from alibi_lm.train.entry import quiet_libraries, share_cores

    console.muted = int(os.environ["RANK"]) != 0
    quiet_libraries()
    share_cores()

    # Imported here: DeepSpeed picks its accelerator and log level from the environment.
    import torch.distributed as dist

    from alibi_lm.evals.models.sharded import EvalRanks
    from alibi_lm.parallel.mesh import ParallelDim, make_mesh
    from alibi_lm.train.distributed import join_process_group

    try:
        join_process_group(int(os.environ["LOCAL_RANK"]))
        rank, size = dist.get_rank(), dist.get_world_size()
        everyone = EvalRanks(rank, dp=ParallelDim(rank, size))
        suite = everyone.run_on_all_ranks(read)
        _check_degree(suite.parallel.tp, size)
        mesh = make_mesh(suite.parallel.tp)
        work(suite, EvalRanks(rank, mesh.tp, mesh.dp))
        dist.barrier()  # rank 0 writes last
    except UserError as error:
        return _told(error)
    except OSError as error:
        mistake = path_error(error)
        if mistake is None:
            raise
        return _told(mistake)
    except KeyboardInterrupt:
        console.error("interrupted")
        return EXIT_INTERRUPTED
    return 0


def _check_degree(tp: int, size: int) -> None:
    if size % tp:
        rule = f"does not divide the {size} ranks"
        fix = f"start a multiple of {tp} ranks, or lower it"
        raise ConfigError(Problem("parallel.tp", tp, rule, fix))


def _told(error: UserError) -> int:
    """Say an error, and its exit code. As a rule every rank has found the same one."""
    import torch.distributed as dist

    console.error(str(error))
    if dist.is_initialized():
        # The launcher ends all ranks when the first one leaves: rank 0 writes its line before.
        try:
            dist.barrier(async_op=True).wait(AGREEMENT_TIMEOUT)
        except RuntimeError:  # the others go on: it is this rank's alone
            if console.muted:
                console.muted = False
                console.error(str(error))
    return error.exit_code


def _end(code: int) -> NoReturn:
    """End the process without the interpreter's own shutdown, as `train.entry.run` does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
