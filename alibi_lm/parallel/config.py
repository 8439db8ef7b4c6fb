"""The `parallel` section of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from alibi_lm.utils.settings import Section


@dataclass
class ParallelConfig(Section):
    """How the model is split over ranks; the remaining ranks are data parallel."""

    aliases: ClassVar[Mapping[str, str]] = {
        "tp": "tensor_parallel_size tensor_model_parallel_size",
        "pp": "pipeline_parallel_size pipeline_model_parallel_size",
    }

    tp: PositiveInt = 1
    """Tensor-parallel ranks: each holds a slice of every matrix and its own heads."""
    pp: PositiveInt = 1
    """Pipeline stages: each holds some of the layers. Needs ZeRO stage 0 or 1."""
