"""The parallel section of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alibi_lm.errors import Problem


@dataclass
class ParallelConfig:
    """How the model is split over ranks; what is left over is data parallel."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a slice of every matrix and its own heads."""
    pp: int = 1
    """Pipeline stages: each holds some of the blocks."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for name in ("tp", "pp"):
            value = getattr(self, name)
            if value != 1:
                yield Problem(
                    f"{key}{name}",
                    value,
                    "this version splits the data and, by ZeRO, the states only",
                    f"set {key}{name}=1 and a zero_optimization stage",
                )
