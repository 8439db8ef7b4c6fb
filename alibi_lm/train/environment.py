"""Which rank a process is, by the variables of the launcher that started it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from alibi_lm.utils.errors import ConfigError, Problem

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class _Launcher:
    """The names under which a launcher passes a process its rank."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str
    address: str | None = None


# `deepspeed --launcher slurm | openmpi | mpich | impi | mvapich` starts bare processes.
_LAUNCHERS = (
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
              "MV2_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
              "SLURM_LAUNCH_NODE_IPADDR"),
)  # fmt: skip


def launcher_environment(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What is to be added to the environment so that RANK and the rest are there.

    deepspeed's own launcher and torchrun set them all. MPI and Slurm launchers set their own
    names, which are mapped. A process that nobody launched is the only rank.

    Raises:
        ConfigError: there are several ranks, but nothing says where rank 0 listens.
    """
    if "RANK" in environment:
        return {"LOCAL_RANK": environment.get("LOCAL_RANK", str(local_rank))}
    for names in _LAUNCHERS:
        if int(environment.get(names.world_size, "1")) > 1 and names.rank in environment:
            return _mapped(environment, names)
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip


def free_port() -> int:
    """A TCP port of this host that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _mapped(environment: Mapping[str, str], names: _Launcher) -> dict[str, str]:
    size = environment[names.world_size]
    local_size = environment.get(names.local_size, "1")
    address = environment.get("MASTER_ADDR") or environment.get(names.address or "")
    if not address and local_size == size:
        address = "127.0.0.1"
    if not address:
        rule = f"is not set, and {names.world_size} = {size} ranks need it"
        raise ConfigError(
            Problem("MASTER_ADDR", None, rule, "export the address of rank 0's host to every rank")
        )
    return {
        "RANK": environment[names.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get(names.local_rank, "0"),
        "LOCAL_SIZE": local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT", str(DEFAULT_PORT)),
    }
