"""How ranks are numbered, and which layers each pipeline stage holds; plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from alibi_lm.utils.text import counted


@dataclass(frozen=True)
class RankCoordinate:
    """A rank's coordinate in each parallel dimension."""

    stage: int
    """Its pipeline stage."""
    data: int
    """Its data-parallel rank: which samples it reads."""
    tensor: int
    """Its tensor-parallel rank: which slice of every matrix it holds."""


@dataclass(frozen=True)
class Layout:
    """The degrees of a run's parallelism.

    Tensor-parallel ranks are neighbors, because they communicate most; then come data-parallel
    ranks; pipeline stages, which communicate least, are farthest apart:
    rank = (stage * dp + data) * tp + tensor.
    """

    dp: int
    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> RankCoordinate:
        """A rank's coordinates."""
        rest, tensor = divmod(rank, self.tp)
        stage, data = divmod(rest, self.dp)
        return RankCoordinate(stage, data, tensor)

    def tensor_groups(self) -> list[list[int]]:
        """The ranks that share the slices of a layer."""
        return [list(range(first, first + self.tp)) for first in range(0, self.num_ranks, self.tp)]

    def data_groups(self) -> list[list[int]]:
        """The ranks that hold the same slice of the same layers."""
        per_stage = self.dp * self.tp
        return [
            list(range(first + tensor, first + per_stage, self.tp))
            for first in range(0, self.num_ranks, per_stage)
            for tensor in range(self.tp)
        ]

    def pipeline_groups(self) -> list[list[int]]:
        """The ranks that pass a sample's activations along, first stage first."""
        per_stage = self.dp * self.tp
        return [list(range(first, self.num_ranks, per_stage)) for first in range(per_stage)]

    def describe(self) -> str:
        """The layout in a few words."""
        degrees = [
            f"{size} {name}"
            for size, name in (
                (self.pp, "pipeline stages"),
                (self.dp, "data-parallel"),
                (self.tp, "tensor-parallel"),
            )
            if size > 1 or name == "data-parallel"
        ]
        if len(degrees) == 1:
            return counted(self.num_ranks, "rank")
        return f"{counted(self.num_ranks, 'rank')} ({' x '.join(degrees)})"


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """The layers of every stage, as indices into the layer list.

    Layer 0 is the Embedding, 1 to `num_layers` are the Blocks, `num_layers` + 1 is the Head. The
    blocks are spread evenly. Where that leaves some over, the stages in the middle take one more
    each, then the first, since the first also embeds and the last also makes the logits.

    `num_layers` must be at least `pp`.
    """
    assert 1 <= pp <= num_layers, f"{num_layers} blocks over {pp} stages"
    share, left = divmod(num_layers, pp)
    takers = {*[*range(1, pp - 1), 0][:left]} if pp > 1 else set()
    stages, start = [], 0
    for stage in range(pp):
        stop = start + share + (stage in takers) + (stage == 0) + (stage == pp - 1)
        stages.append(range(start, stop))
        start = stop
    return stages
