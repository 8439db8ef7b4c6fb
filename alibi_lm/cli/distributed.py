"""Commands that run in one process, or on all ranks that a launcher has started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.exit import leave, run_and_report
from alibi_lm.utils.logging import console

if TYPE_CHECKING:
    from alibi_lm.evals.config import SuiteConfig
    from alibi_lm.evals.models.sharded import EvalRanks


def on_ranks(
    read: Callable[[], SuiteConfig],
    work: Callable[[SuiteConfig, EvalRanks], None],
    local_rank: int,
    device: str | None = None,
) -> None:
    """Run `work` in this process, or as one of the ranks that a launcher has started.

    Only rank 0 writes and prints. With several ranks the process ends here, with its exit code.

    Args:
        read: returns the settings; `parallel.tp` is how many ranks share a model.
        work: what every rank does.
        local_rank: as the deepspeed launcher passes it.
        device: what the ranks compute on, as `get_device` takes it.

    Raises:
        UserError: as `read` and `work`, with one process.
    """
    from alibi_lm.evals.models.sharded import ONE_PROCESS
    from alibi_lm.train.environment import launcher_environment

    # Slurm sets its variables in a batch script too, but only srun starts ranks.
    steps = "SLURM_STEP_ID" in os.environ
    seen = {k: v for k, v in os.environ.items() if steps or not k.startswith("SLURM_")}
    added = launcher_environment(seen, local_rank)
    if int(added.get("WORLD_SIZE") or seen.get("WORLD_SIZE", "1")) > 1:
        os.environ.update(added)
        leave(
            run_and_report(lambda: _work_as_rank(read, work, device), "interrupted", watched=False)
        )
    suite = read()
    if suite.parallel.tp > 1:
        rule = "needs several ranks, and this is one process"
        fix = f"start `deepspeed --num_gpus {suite.parallel.tp} --module alibi_lm eval ...`"
        raise ConfigError(Problem("parallel.tp", suite.parallel.tp, rule, fix))
    work(suite, ONE_PROCESS)


def _work_as_rank(
    read: Callable[[], SuiteConfig],
    work: Callable[[SuiteConfig, EvalRanks], None],
    device: str | None,
) -> int:
    """Join the other ranks and do this one's part; returns exit code 0."""
    from alibi_lm.train.entry import quiet_libraries, share_cores

    console.muted = int(os.environ["RANK"]) != 0
    quiet_libraries()
    share_cores()

    # Imported here: DeepSpeed picks its accelerator and log level from the environment.
    import torch.distributed as dist

    from alibi_lm.evals.models.sharded import EvalRanks
    from alibi_lm.parallel.errors import run_on_all_ranks
    from alibi_lm.parallel.mesh import make_mesh
    from alibi_lm.parallel.process_group import join_process_group

    join_process_group(int(os.environ["LOCAL_RANK"]), device)
    suite = run_on_all_ranks(read)
    _check_degree(suite.parallel.tp, dist.get_world_size())
    mesh = make_mesh(suite.parallel.tp)
    work(suite, EvalRanks(dist.get_rank(), mesh.tp, mesh.dp))
    dist.barrier()  # rank 0 writes last
    return 0


def _check_degree(tp: int, size: int) -> None:
    if size % tp:
        rule = f"does not divide the {size} ranks"
        fix = f"start a multiple of {tp} ranks, or lower it"
        raise ConfigError(Problem("parallel.tp", tp, rule, fix))
