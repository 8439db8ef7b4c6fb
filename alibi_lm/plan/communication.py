"""Bytes that a rank sends in one step, by kind.

Counted as the ring algorithms send them, on each of n ranks and of S bytes: an all-reduce
2 (n - 1) / n S, an all-gather or reduce-scatter (n - 1) / n S, where S is the whole; a reduce to
one rank S; between stages the bytes sent. (The factors are those of NCCL-tests'
"bus bandwidth".) Asynchronous and overlapped traffic counts too. Collectives of a few numbers
(norms, losses, flags) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from alibi_lm.model.layers import vocab_size
from alibi_lm.plan.memory import FP32, flat_sizes, padded, zero3_gathers
from alibi_lm.plan.parameters import HeldParameter
from alibi_lm.plan.planned_run import PlannedRun


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one step."""

    tensor: float = 0.0
    """Tensor parallel: all-reduces of activations and of their gradients."""
    pipeline: float = 0.0
    """Pipeline: activations to the next stage, their gradients to the previous one."""
    pipeline_gathers: float = 0.0
    """Pipeline: gathering, among tensor-parallel ranks, what was sent in shares."""
    tied: float = 0.0
    """First and last stage: the gradient of tied embeddings."""
    gradients: float = 0.0
    """Data parallel: reducing gradients."""
    weights: float = 0.0
    """Data parallel: gathering weights that ZeRO splits."""

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(getattr(self, field.name) for field in fields(self))


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that a rank sends to all-reduce `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def all_gather(size: float, ranks: int) -> float:
    """Bytes that a rank sends where `size` bytes in all are gathered, or reduced and scattered."""
    return (ranks - 1) / ranks * size


def sent(run: PlannedRun, stage: int, parameters: Sequence[HeldParameter]) -> Sent:
    """Bytes sent in a step by a rank of a pipeline stage that holds these parameters."""
    pipeline, partial = _pipeline(run, stage)
    gradients, weights = _data(run, parameters)
    return Sent(
        tensor=_tensor(run, stage),
        pipeline=pipeline,
        pipeline_gathers=partial,
        tied=_tied(run, stage),
        gradients=gradients,
        weights=weights,
    )


def _tensor(run: PlannedRun, stage: int) -> float:
    """All-reduces over the tensor-parallel ranks (Shoeybi et al. 2019, section 3).

    Of the residual stream: a block two forward and two backward, and one more if it is recomputed
    (the attention's; recomputation ends before the MLP's), the embedding one, the loss one
    backward. Also the loss's three fp32 numbers a token, and the gradients of replicated key/value
    weights.
    """
    model, tp, tokens = run.config.model, run.layout.tp, run.tokens
    if tp == 1:
        return 0.0
    line = tokens * run.width * model.hidden_size
    again = run.config.train.activation_checkpointing
    size = run.num_blocks(stage) * (4 + again) * line
    if stage == 0:
        size += line
    if stage == run.layout.pp - 1:
        size += line + 3 * FP32 * tokens
    if tp > model.kv_heads:
        # One all-reduce over all ranks, each set of copies in its own place.
        rows = 2 * model.head_dim * model.kv_heads
        bias = model.architecture == "bloom"
        copied = run.width * rows * (model.hidden_size + bias)
        size += run.num_blocks(stage) * copied
    return all_reduce(size, tp) * run.num_micro_batches


def _pipeline(run: PlannedRun, stage: int) -> tuple[float, float]:
    """Bytes sent to other stages, and gathered among the ranks of this one."""
    layout, model = run.layout, run.config.model
    line = run.tokens * run.width * model.hidden_size
    sends_on, sends_back = stage < layout.pp - 1, stage > 0
    shared = layout.tp > 1 and run.pipeline_partitioned
    size = line / layout.tp if shared else line
    stage_bytes = (sends_on + sends_back) * size
    # Forward, a stage gathers its input; backward, the output that it sent (of which it kept only
    # its share) and that output's gradient.
    times = (sends_back + 2 * sends_on) * shared
    partial = times * all_gather(line, layout.tp)
    return stage_bytes * run.num_micro_batches, partial * run.num_micro_batches


def _tied(run: PlannedRun, stage: int) -> float:
    layout, model = run.layout, run.config.model
    if not model.tied_embeddings or layout.pp == 1 or stage not in (0, layout.pp - 1):
        return 0.0
    share = -(-vocab_size(model) // layout.tp)
    return all_reduce(FP32 * share * model.hidden_size, 2)


def _data(run: PlannedRun, parameters: Sequence[HeldParameter]) -> tuple[float, float]:
    """Gradients and weights over the data-parallel ranks.

    Gradients are sent in fp32 (`communication_data_type`). Stages 0 and 1 reduce them once a step,
    stages 2 and 3 once a micro-batch. DeepSpeed's stages 1 and 2 all-reduce whole buckets, although
    each rank needs only its part.
    """
    ranks, zero = run.layout.dp, run.zero
    if ranks == 1:
        return 0.0, 0.0
    numel = sum(held.numel for held in parameters)
    if zero.stage == 0:
        return all_reduce(FP32 * numel, ranks), 0.0
    if zero.stage == 3:
        return _zero3(run, parameters)
    flat = sum(flat_sizes(run, parameters))
    size = FP32 * (flat if run.bf16_optimizer else numel)
    reduced = all_reduce(size, ranks) if zero.all_reduced or run.bf16_optimizer else size
    times = run.num_micro_batches if zero.stage == 2 else 1
    return times * reduced, all_gather(run.width * flat, ranks)


def _zero3(run: PlannedRun, parameters: Sequence[HeldParameter]) -> tuple[float, float]:
    ranks, times = run.layout.dp, run.num_micro_batches
    gathers = zero3_gathers(run, parameters)
    whole = {held.name: padded(held.numel, ranks) for held in parameters}
    gathered = sum(
        size * (1 if name in gathers.persistent else times * gathers.counts[name])
        for name, size in whole.items()
    )
    gradients = all_gather(FP32 * sum(whole.values()), ranks) * times
    return gradients, all_gather(run.width * gathered, ranks)
