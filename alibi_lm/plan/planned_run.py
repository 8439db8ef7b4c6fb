"""A run on a number of ranks: the checked config, its layout and DeepSpeed's ZeRO settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from alibi_lm.config import Config
from alibi_lm.parallel.layout import Layout, stage_layers
from alibi_lm.train.engine.deepspeed_config import accumulation_steps, zero_config, zero_stage

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value by precision."""


@dataclass(frozen=True)
class ZeroSettings:
    """The ZeRO settings that decide memory and traffic; defaults are DeepSpeed's."""

    stage: int
    reduce_bucket_size: int
    """Gradients reduced at once, in elements."""
    contiguous_gradients: bool
    """Whether gradients are copied into a bucket before they are reduced."""
    overlap_comm: bool
    """Whether gradients are reduced during the backward pass, from two alternating buckets."""
    all_reduced: bool
    """Whether stages 1 and 2 all-reduce a bucket instead of reducing its parts to their owners."""
    persistence_threshold: int
    """Stage 3: parameters of at most this many elements stay whole during a step."""
    model_persistence_threshold: int
    """Stage 3: elements of all of them together."""
    prefetch_bucket_size: int
    """Stage 3: elements gathered ahead."""
    max_live_parameters: int
    """Stage 3: number of whole elements beyond which nothing is gathered ahead."""
    max_reuse_distance: int
    """Stage 3: parameters used again within this many elements stay whole."""
    offload_optimizer: bool
    """Whether the host holds master weights, moments and their gradients."""
    offload_param: bool
    """Whether the host holds the parts of the weights too."""
    immediate_grad_update: bool
    """Stage 1 in bf16: whether a bf16 gradient is freed as soon as it is added in fp32."""


def zero_settings(block: dict[str, Any]) -> ZeroSettings:
    """The ZeRO settings of a valid `deepspeed:` block, with DeepSpeed's defaults."""
    zero = zero_config(block)

    def offloaded(section: Any) -> bool:
        return section is not None and section.device.value != "none"

    return ZeroSettings(
        stage=zero_stage(block),
        reduce_bucket_size=int(zero.reduce_bucket_size),
        contiguous_gradients=zero.contiguous_gradients,
        overlap_comm=bool(zero.overlap_comm),
        all_reduced=zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter,
        persistence_threshold=int(zero.param_persistence_threshold),
        model_persistence_threshold=int(zero.model_persistence_threshold),
        prefetch_bucket_size=int(zero.prefetch_bucket_size),
        max_live_parameters=int(zero.max_live_parameters),
        max_reuse_distance=int(zero.max_reuse_distance),
        offload_optimizer=offloaded(zero.offload_optimizer),
        offload_param=offloaded(zero.offload_param),
        immediate_grad_update=bool(block.get("bf16", {}).get("immediate_grad_update", False)),
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run on a number of ranks."""

    config: Config
    layout: Layout
    zero: ZeroSettings
    pipeline_partitioned: bool = True
    """Whether, with tensor parallelism, each rank of a stage sends the next stage its share of the
    activations (and back, of their gradients), which the receivers gather. DeepSpeed's default
    (`pipe_partitioned`, `grad_partitioned`)."""

    @property
    def width(self) -> int:
        """Bytes of a weight or activation in the forward and backward passes."""
        return WIDTHS[self.config.train.precision]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        return accumulation_steps(self.config, self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.train.micro_batch_size * self.config.train.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.config.train.global_batch_size * self.config.train.sequence_length

    @cached_property
    def stages(self) -> list[range]:
        """The layers of every pipeline stage."""
        return stage_layers(self.config.model.num_layers, self.layout.pp)

    def num_blocks(self, stage: int) -> int:
        """Blocks of a pipeline stage."""
        blocks = range(1, self.config.model.num_layers + 1)
        return sum(layer in blocks for layer in self.stages[stage])

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once.

        One without a pipeline. With one, stage s of p starts min(p - s, m) of the m micro-batches
        before the first one's gradient comes back (one-forward-one-backward, Narayanan et al.
        2021, section 2.2).
        """
        return min(self.layout.pp - stage, self.num_micro_batches)

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer runs, which keeps all gradients in fp32."""
        bf16 = self.config.train.precision == "bf16"
        return bf16 and self.zero.stage == 1 and not self.zero.offload_optimizer
