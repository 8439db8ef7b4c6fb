"""The launchers' variables become RANK and the rest."""

import pytest

from alibi_lm.train.environment import launcher_environment
from alibi_lm.utils.errors import ConfigError

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}


def test_a_launched_rank_is_left_as_it_is() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "9"}
    assert launcher_environment(given, 1) == {"LOCAL_RANK": "1"}


def test_openmpi_and_slurm_are_mapped() -> None:
    mapped = launcher_environment(OPENMPI | {"MASTER_ADDR": "10.0.0.1"}, 0)
    assert mapped["RANK"] == "3"
    assert mapped["WORLD_SIZE"] == "4"
    assert mapped["LOCAL_RANK"] == "1"
    assert mapped["MASTER_ADDR"] == "10.0.0.1"
    assert mapped["MASTER_PORT"] == "29500"
    mapped = launcher_environment(SLURM | {"MASTER_PORT": "1234"}, 0)
    assert (mapped["RANK"], mapped["WORLD_SIZE"], mapped["LOCAL_RANK"]) == ("5", "8", "1")
    assert (mapped["MASTER_ADDR"], mapped["MASTER_PORT"]) == ("10.0.0.7", "1234")


def test_one_host_needs_no_address_and_several_do() -> None:
    local = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert launcher_environment(local, 0)["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        launcher_environment(OPENMPI, 0)


def test_nobody_launched_it() -> None:
    alone = launcher_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 0)
    assert (alone["RANK"], alone["WORLD_SIZE"]) == ("0", "1")
