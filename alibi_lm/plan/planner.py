"""The plan of a run, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from alibi_lm.config import Config
from alibi_lm.data.manifest import vocabulary_size
from alibi_lm.data.sampling import batch_indices
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.model.flops import flops_per_token, num_parameters
from alibi_lm.model.position_scaling import head_slopes
from alibi_lm.model.slopes import slice_slopes
from alibi_lm.parallel.layout import Layout, RankCoordinate
from alibi_lm.plan.communication import Sent, sent
from alibi_lm.plan.memory import Activations, States, activations, states
from alibi_lm.plan.parameters import HeldParameter, held_parameters
from alibi_lm.plan.planned_run import PlannedRun, zero_settings
from alibi_lm.train.run import read_config

ASSUMED_VOCABULARY = 50_304
"""Vocabulary size if neither the config nor the data says."""
CHECKPOINT_BYTES = 12
"""Bytes per parameter: fp32 weight and two moments."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, reads and sends."""

    run: PlannedRun
    rank: int

    @property
    def place(self) -> RankCoordinate:
        """The rank's coordinate in the layout."""
        return self.run.layout.place(self.rank)

    @property
    def layers(self) -> range:
        """Its layers: 0 is the embedding, the blocks follow, the last is the head."""
        return self.run.stages[self.place.stage]

    @property
    def heads(self) -> range:
        """Its query heads."""
        share = self.run.config.model.num_heads // self.run.layout.tp
        return range(self.place.tensor * share, (self.place.tensor + 1) * share)

    @property
    def kv_heads(self) -> range:
        """Its key/value heads."""
        heads, tp = self.run.config.model.kv_heads, self.run.layout.tp
        share = max(1, heads // tp)
        first = self.place.tensor * heads // tp
        return range(first, first + share)

    @property
    def slopes(self) -> tuple[float, ...] | None:
        """Slopes of its heads (of learned ones the initial values), or None without ALiBi."""
        slopes = head_slopes(self.run.config.model)
        if slopes is None:
            return None
        return slice_slopes(slopes, self.place.tensor, self.run.layout.tp)

    def samples(self, step: int = 0) -> list[list[int]]:
        """The samples that it reads in a step, by micro-batch."""
        train, layout = self.run.config.train, self.run.layout
        return batch_indices(
            step, train.global_batch_size, self.place.data, layout.dp, train.micro_batch_size
        )

    @cached_property
    def parameters(self) -> list[HeldParameter]:
        """Its parameters before ZeRO splits them."""
        return held_parameters(self.run, self.rank)

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters."""
        return sum(held.numel for held in self.parameters)

    @cached_property
    def states(self) -> States:
        """Bytes of its weights and optimizer states."""
        return states(self.run, self.parameters, self.place.data)

    @cached_property
    def activations(self) -> Activations:
        """Bytes of its activations."""
        return activations(self.run, self.place.stage)

    @cached_property
    def sent(self) -> Sent:
        """Bytes that it sends in a step."""
        return sent(self.run, self.place.stage, self.parameters)

    @property
    def total(self) -> int:
        """Bytes on its device."""
        return self.states.total + self.activations.total


@dataclass(frozen=True)
class Plan:
    """A run on a number of ranks."""

    run: PlannedRun
    notes: Sequence[str] = ()
    """Assumptions."""

    def rank(self, rank: int) -> RankPlan:
        """The plan of one rank."""
        return RankPlan(self.run, rank)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return num_parameters(self.run.config.model)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint without its small files."""
        return CHECKPOINT_BYTES * self.num_parameters

    @property
    def model_flops(self) -> float:
        """FLOPs of a step, as MFU counts them."""
        config = self.run.config
        per_token = flops_per_token(config.model, config.train.sequence_length)
        return per_token * self.run.tokens_per_step

    @property
    def hardware_flops(self) -> float:
        """FLOPs that the devices carry out, recomputation included.

        Recomputation repeats each block's forward pass, so the blocks' share grows by a third
        (Narayanan et al. 2021, appendix: 96 B s l h^2 (1 + s / 6h + V / 16lh)).
        """
        model, tokens = self.run.config.model, self.run.tokens_per_step
        if not self.run.config.train.activation_checkpointing:
            return self.model_flops
        output = 6.0 * (model.vocab_size or 0) * model.hidden_size * tokens
        return (self.model_flops - output) * 4 / 3 + output

    @property
    def bubble(self) -> float:
        """Idle time of the pipeline relative to its busy time: (p - 1) / m."""
        return (self.run.layout.pp - 1) / self.run.num_micro_batches


def make_plan(path: str | Path, overrides: Sequence[str], num_ranks: int) -> Plan:
    """The plan of a config on `num_ranks` ranks. Starts nothing and allocates no tensor.

    Raises:
        ConfigError: with every problem that would keep the run from starting.
    """
    config, block = read_config(path, overrides, num_ranks)
    notes = _fill_vocabulary(config)
    tp, pp = config.parallel.tp, config.parallel.pp
    layout = Layout(num_ranks // (tp * pp), tp, pp)
    return Plan(PlannedRun(config, layout, zero_settings(block)), notes)


def _fill_vocabulary(config: Config) -> list[str]:
    """Set `model.vocab_size` as training would; notes what is assumed where the data is absent."""
    path = config.data.tokenizer
    tokenizer = load_tokenizer(Path(path)) if path is not None and Path(path).exists() else None
    size = vocabulary_size(config.model.vocab_size, config.data, tokenizer)
    config.model.vocab_size = ASSUMED_VOCABULARY if size is None else size
    if size is not None:
        return []
    return [
        f"model.vocab_size is not set and the tokenizer is not here: {ASSUMED_VOCABULARY:,} token "
        "ids assumed"
    ]
