"""This rank's position in each parallel dimension, and the process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from alibi_lm.parallel.layout import Layout


@dataclass(frozen=True)
class ParallelDim:
    """One parallel dimension, as this rank sees it."""

    rank: int
    """This rank's number in its group."""
    size: int
    """Ranks in a group."""
    group: dist.ProcessGroup | None = None
    """The process group; None is all ranks, or at size 1 no group."""


NO_PARALLEL = ParallelDim(0, 1)
"""A dimension of size 1."""


@dataclass(frozen=True)
class Mesh:
    """Which part of the model this rank holds and which samples it reads.

    `Layout` numbers the ranks.
    """

    tp: ParallelDim
    dp: ParallelDim
    pp: ParallelDim = NO_PARALLEL

    @property
    def layout(self) -> Layout:
        """The degrees."""
        return Layout(self.dp.size, self.tp.size, self.pp.size)


def make_mesh(tp: int, pp: int = 1) -> Mesh:
    """Create the process groups for `tp` tensor-parallel ranks and `pp` pipeline stages.

    Every rank calls it. tp x pp must divide the number of ranks (`rules.layout_problems` says so
    to the user).
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert num_ranks % (tp * pp) == 0, f"{tp} x {pp} does not divide {num_ranks} ranks"
    layout = Layout(num_ranks // (tp * pp), tp, pp)
    if tp * pp == 1:
        return Mesh(NO_PARALLEL, ParallelDim(rank, num_ranks))
    return Mesh(
        _parallel_dim(rank, layout.tensor_groups()) if tp > 1 else NO_PARALLEL,
        _parallel_dim(rank, layout.data_groups()),  # DeepSpeed asks for it even at size 1
        _parallel_dim(rank, layout.pipeline_groups()) if pp > 1 else NO_PARALLEL,
    )


def _parallel_dim(rank: int, groups: list[list[int]]) -> ParallelDim:
    own = None
    for ranks in groups:
        group = dist.new_group(ranks)  # every rank must create every group
        if rank in ranks:
            own = ParallelDim(ranks.index(rank), len(ranks), group)
    assert own is not None
    return own


class ModelParallelUnit:
    """A mesh under the names that `deepspeed.initialize(mpu=...)` asks for.

    With it ZeRO partitions over the data-parallel ranks only, and gradient norms sum over the
    tensor-parallel ones.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """This rank's number in its tensor-parallel group."""
        return self._mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self._mesh.tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group."""
        return self._mesh.tp.group

    def get_data_parallel_rank(self) -> int:
        """This rank's number in its data-parallel group."""
        return self._mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        """Ranks of a data-parallel group."""
        return self._mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The data-parallel group."""
        return self._mesh.dp.group
