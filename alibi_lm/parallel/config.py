"""The parallel section of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alibi_lm.utils.errors import Problem


@dataclass
class ParallelConfig:
    """How the model is split over ranks; what is left over is data parallel."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a slice of every matrix and its own heads."""
    pp: int = 1
    """Pipeline stages: each holds some of the blocks. Needs ZeRO stage 0 or 1."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        if self.tp < 1:
            yield Problem(f"{key}tp", self.tp, "is not positive", "give at least 1")
        if self.pp < 1:
            yield Problem(f"{key}pp", self.pp, "is not positive", "give at least 1")
