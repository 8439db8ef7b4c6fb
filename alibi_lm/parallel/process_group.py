"""Joining the process group, and the few collectives that are needed outside of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from alibi_lm.parallel.device import get_device
from alibi_lm.utils.errors import ConfigError, Problem


def join_process_group(local_rank: int, device: str | None = None) -> None:
    """Join the process group that the launcher's environment variables describe.

    Args:
        local_rank: this rank's number on its host, which selects its accelerator.
        device: `cpu` to communicate between CPUs; by default the accelerator's backend is used.

    Raises:
        ConfigError: the ranks cannot connect to the launcher's address and port.
    """
    # Imported here: DeepSpeed takes seconds, and a single process does without it.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.set_device(local_rank)
    avoid_shared_memory()
    backend = "gloo" if device == "cpu" else accelerator.communication_backend_name()
    try:
        deepspeed.init_distributed(backend, verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as failure:
        rule = f"the ranks cannot connect ({str(failure).splitlines()[0]})"
        fix = "check that every host starts its ranks, or give the launcher another --master_port"
        raise ConfigError(Problem("the master port", None, rule, fix)) from None


def avoid_shared_memory() -> None:
    """Turn off DeepSpeed's own all-reduce for the ranks of a CPU host.

    It is compiled at the first start, which takes a minute, and leaks 69 MB of shared memory a
    rank whenever a process ends. Call this before `deepspeed.init_distributed`.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def rank() -> int:
    """This process's rank."""
    return dist.get_rank()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size()


def sum_over_ranks(*values: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """The sum of each value over all ranks (or a group's), in fp64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=get_device())
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's (picklable) value, in rank order, on every rank; [value] in one process."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
