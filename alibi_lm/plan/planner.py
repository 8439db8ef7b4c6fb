"""The plan of a run: what `alibi-lm plan` shows."""

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
from alibi_lm.plan.setting import Setting, zero_settings
from alibi_lm.train.run import read_config

ASSUMED_VOCABULARY = 50_304
"""Token ids where the config does not say and the data is not here."""
CHECKPOINT_BYTES = 12
"""Of a parameter: fp32 weight and two moments."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, reads and sends."""

    setting: Setting
    rank: int

    @property
    def place(self) -> RankCoordinate:
        """Where the rank stands."""
        return self.setting.layout.place(self.rank)

    @property
    def layers(self) -> range:
        """Its layers: 0 is the embedding, the blocks follow, the last is the head."""
        return self.setting.stages[self.place.stage]

    @property
    def heads(self) -> range:
        """Its query heads."""
        share = self.setting.config.model.num_heads // self.setting.layout.tp
        return range(self.place.tensor * share, (self.place.tensor + 1) * share)

    @property
    def kv_heads(self) -> range:
        """Its key/value heads."""
        heads, tp = self.setting.config.model.kv_heads, self.setting.layout.tp
        share = max(1, heads // tp)
        first = self.place.tensor * heads // tp
        return range(first, first + share)

    @property
    def slopes(self) -> tuple[float, ...] | None:
        """Slopes of its heads, learned ones as at the start; None without linear biases."""
        slopes = head_slopes(self.setting.config.model)
        if slopes is None:
            return None
        return slice_slopes(slopes, self.place.tensor, self.setting.layout.tp)

    def samples(self, step: int = 0) -> list[list[int]]:
        """The samples of a step that it reads, micro-batch by micro-batch."""
        train, layout = self.setting.config.train, self.setting.layout
        return batch_indices(
            step, train.global_batch_size, self.place.data, layout.dp, train.micro_batch_size
        )

    @cached_property
    def parameters(self) -> list[HeldParameter]:
        """What it holds of the model before ZeRO splits it."""
        return held_parameters(self.setting, self.rank)

    @property
    def num_parameters(self) -> int:
        """Elements of these."""
        return sum(held.numel for held in self.parameters)

    @cached_property
    def states(self) -> States:
        """Bytes of its weights and optimizer states."""
        return states(self.setting, self.parameters, self.place.data)

    @cached_property
    def activations(self) -> Activations:
        """Bytes of its activations."""
        return activations(self.setting, self.place.stage)

    @cached_property
    def sent(self) -> Sent:
        """Bytes that it sends in a step."""
        return sent(self.setting, self.place.stage, self.parameters)

    @property
    def total(self) -> int:
        """Bytes on its device."""
        return self.states.total + self.activations.total


@dataclass(frozen=True)
class Plan:
    """A run on a number of ranks."""

    setting: Setting
    notes: Sequence[str] = ()
    """What had to be assumed."""

    def rank(self, rank: int) -> RankPlan:
        """One rank's part."""
        return RankPlan(self.setting, rank)

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a shared one counts once."""
        return num_parameters(self.setting.config.model)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, its small files aside."""
        return CHECKPOINT_BYTES * self.num_parameters

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step, as MFU counts them."""
        config = self.setting.config
        per_token = flops_per_token(config.model, config.train.sequence_length)
        return per_token * self.setting.tokens_per_step

    @property
    def hardware_flops(self) -> float:
        """Those that the devices carry out: recomputation counts too.

        With it a block's forward pass is done twice, so its share grows by a third (Narayanan et
        al. 2021, appendix: 96 B s l h^2 (1 + s / 6h + V / 16lh)).
        """
        model, tokens = self.setting.config.model, self.setting.tokens_per_step
        if not self.setting.config.train.activation_checkpointing:
            return self.model_flops
        output = 6.0 * (model.vocab_size or 0) * model.hidden_size * tokens
        return (self.model_flops - output) * 4 / 3 + output

    @property
    def bubble(self) -> float:
        """Idle time of the pipeline as a part of the busy time: (p - 1) / m."""
        return (self.setting.layout.pp - 1) / self.setting.num_micro_batches


def make_plan(path: str | Path, overrides: Sequence[str], num_ranks: int) -> Plan:
    """The plan of a config on `num_ranks` ranks. Starts nothing and makes no tensor.

    Raises:
        ConfigError: with every problem that would keep the run from starting on them.
    """
    config, block = read_config(path, overrides, num_ranks)
    notes = _fill_vocabulary(config)
    tp, pp = config.parallel.tp, config.parallel.pp
    layout = Layout(num_ranks // (tp * pp), tp, pp)
    return Plan(Setting(config, layout, zero_settings(block)), notes)


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
