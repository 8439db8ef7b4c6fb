"""The config of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alibi_lm.config_loading import apply_overrides, build, load_yaml
from alibi_lm.data.config import DataConfig
from alibi_lm.model.config import ModelConfig
from alibi_lm.parallel.config import ParallelConfig
from alibi_lm.train.config import RunConfig, TrainConfig
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Section, rule


@dataclass
class Config(Section):
    """A training run."""

    run: RunConfig
    """The run folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The decoder."""
    data: DataConfig = field(default_factory=DataConfig)
    """The token files and their tokenizer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimization, checkpoints, logging and faults."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The split over ranks."""
    deepspeed: dict[str, Any] | str = field(default_factory=dict)
    """DeepSpeed's own settings under its own names, or the path of a JSON file with them; the
    default ZeRO stage is 1."""

    @rule
    def _positions_suffice(self) -> Iterator[Problem]:
        limit, length = self.model.max_positions, self.train.sequence_length
        if limit is not None and length > limit:
            rule = f"exceeds model.max_positions = {limit}"
            yield Problem("train.sequence_length", length, rule, "lower it")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's YAML, apply `section.key=value` overrides, and check everything.

    Raises:
        ConfigError: with every problem found.
    """
    return build(Config, apply_overrides(load_yaml(path), overrides))
