"""The few collectives that the training code needs, over DeepSpeed's communication layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem, UserError, path_error

T = TypeVar("T")


def join_process_group(local_rank: int) -> None:
    """Make the process group from the launcher's environment, through this rank's own device.

    Raises:
        ConfigError: the ranks cannot meet at the launcher's address and port.
    """
    accelerator = get_accelerator()
    accelerator.set_device(local_rank)
    avoid_shared_memory()
    try:
        deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as failure:
        rule = f"the ranks cannot meet there ({str(failure).splitlines()[0]})"
        fix = "see that every host starts its ranks, or give the launcher another --master_port"
        raise ConfigError(Problem("the master port", None, rule, fix)) from None


def avoid_shared_memory() -> None:
    """Keep DeepSpeed from its own all-reduce for the ranks of a CPU host.

    It is compiled at the first start, for a minute, and leaves 69 MB of shared memory a rank
    behind at every end of a process. Called before `deepspeed.init_distributed`.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size()


def device() -> torch.device:
    """The device that this rank computes on."""
    return torch.device(get_accelerator().current_device_name())


def sum_over_ranks(*values: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """The sum of each value over all ranks (or a group's), in fp64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def gather(value: Any) -> list[Any]:
    """Every rank's (picklable) value, in rank order, on every rank."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(action: Callable[[], T], where: Path | None = None) -> T:
    """Run `action` on every rank; if any rank fails, all raise its error.

    A full disk and its like count as errors that a user can mend. The system does not name the
    file of a failed write; `where` then stands for it.
    """
    error: UserError | None = None
    try:
        result = action()
    except UserError as failure:
        error = failure
    except OSError as failure:
        error = disk_error(failure, where)
    raise_on_all_ranks(error)
    return result


def disk_error(failure: OSError, where: Path | None) -> UserError:
    """What a user can mend of an error of the disk; raises it as it is if that is nothing."""
    failure.filename = failure.filename or where
    error = path_error(failure)
    if error is None:
        raise failure
    return error


def raise_on_all_ranks(error: UserError | None) -> None:
    """Raise on every rank what any rank found, so that no rank waits for one that has left.

    Raises:
        UserError: the first rank's error, by rank order, where there is one.
    """
    for found in gather(error):
        if found is not None:
            found.raised_on_all_ranks = True
            raise found


def raise_if_different(what: str, value: Any) -> None:
    """Raise on every rank unless all ranks hold the same value.

    Raises:
        CheckpointError: naming the ranks that differ from rank 0.
    """
    values = gather(value)
    odd = [number for number, other in enumerate(values) if other != values[0]]
    if odd:
        rule = f"differs between rank 0 and ranks {odd}"
        error = CheckpointError(Problem(what, None, rule, "start every rank with the same files"))
        error.raised_on_all_ranks = True
        raise error
