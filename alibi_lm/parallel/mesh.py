"""The degrees of a run's parallelism, and the process groups that go with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One way of splitting the ranks, as this rank sees it."""

    rank: int
    """This rank's place among the ranks of its group."""
    size: int
    """Ranks of a group."""
    group: dist.ProcessGroup | None = None
    """The group of ranks; None is all ranks, or at size 1 no group at all."""


ALONE = Axis(0, 1)
"""No split."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands: which slice of the model it holds and which samples it reads.

    Tensor-parallel ranks are neighbours (ranks 0 to tp - 1 form the first group), because they
    talk most; ranks that hold the same slice form a data-parallel group.
    """

    tp: Axis
    dp: Axis

    def describe(self) -> str:
        """The layout in a few words."""
        if self.tp.size == 1:
            return f"{self.dp.size} ranks"
        ranks = self.dp.size * self.tp.size
        return f"{ranks} ranks ({self.dp.size} data-parallel x {self.tp.size} tensor-parallel)"


def tensor_parallel_groups(num_ranks: int, tp: int) -> list[list[int]]:
    """The ranks of every tensor-parallel group."""
    return [list(range(first, first + tp)) for first in range(0, num_ranks, tp)]


def data_parallel_groups(num_ranks: int, tp: int) -> list[list[int]]:
    """The ranks of every data-parallel group."""
    return [list(range(first, num_ranks, tp)) for first in range(tp)]


def make_mesh(tp: int) -> Mesh:
    """Make the groups of a run with `tp` tensor-parallel ranks. Every rank calls it.

    `tp` must divide the number of ranks (`rules.layout_problems` says so to the user).
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert num_ranks % tp == 0, f"{tp} tensor-parallel ranks do not divide {num_ranks}"
    if tp == 1:
        return Mesh(ALONE, Axis(rank, num_ranks))
    return Mesh(
        _axis(rank, tensor_parallel_groups(num_ranks, tp)),
        _axis(rank, data_parallel_groups(num_ranks, tp)),
    )


def _axis(rank: int, groups: list[list[int]]) -> Axis:
    found = None
    for ranks in groups:
        group = dist.new_group(ranks)  # every rank takes part in making every group
        if rank in ranks:
            found = Axis(ranks.index(rank), len(ranks), group)
    assert found is not None
    return found


class ModelParallelUnit:
    """A mesh under the names that `deepspeed.initialize(mpu=...)` asks for.

    With it ZeRO partitions over the data-parallel ranks only, and gradient norms sum over the
    tensor-parallel ones.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """This rank's place in its tensor-parallel group."""
        return self._mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self._mesh.tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group."""
        return self._mesh.tp.group

    def get_data_parallel_rank(self) -> int:
        """This rank's place in its data-parallel group."""
        return self._mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        """Ranks of a data-parallel group."""
        return self._mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The data-parallel group."""
        return self._mesh.dp.group
