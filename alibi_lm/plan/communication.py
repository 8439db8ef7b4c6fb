"""Bytes that a rank sends in one step, by kind.

Counted as the ring algorithms send them, on each of n ranks and of S bytes: an all-reduce
2 (n - 1) / n S, an all-gather or reduce-scatter (n - 1) / n S, where S is the whole; a reduce to
one rank S; from stage to stage what is sent. (The factors are those of NCCL-tests'
"bus bandwidth".) What is asynchronous or overlapped is counted alike. Collectives of a few numbers
(norms, losses, flags) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from alibi_lm.model.layers import vocab_size
from alibi_lm.plan.memory import FP32, flat_sizes, padded, stage_3_gathers
from alibi_lm.plan.parameters import HeldParameter
from alibi_lm.plan.setting import Setting


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one step."""

    tensor: float = 0.0
    """Tensor parallel: sums of activations and of their gradients."""
    pipeline: float = 0.0
    """To the next stage activations, to the one before their gradients."""
    pipeline_gathers: float = 0.0
    """Among tensor-parallel ranks: putting together what was sent in shares."""
    tied: float = 0.0
    """First and last stage: the tied matrix's gradient."""
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


def sent(setting: Setting, stage: int, parameters: Sequence[HeldParameter]) -> Sent:
    """What a rank of a pipeline stage sends that holds these parameters."""
    pipeline, partial = _pipeline(setting, stage)
    gradients, weights = _data(setting, parameters)
    return Sent(
        tensor=_tensor(setting, stage),
        pipeline=pipeline,
        pipeline_gathers=partial,
        tied=_tied(setting, stage),
        gradients=gradients,
        weights=weights,
    )


def _tensor(setting: Setting, stage: int) -> float:
    """All-reduces over the tensor-parallel ranks (Shoeybi et al. 2019, section 3).

    Of the residual stream: a block two forward and two backward, one more where it is computed
    again (that of the attention; recomputation ends before the MLP's), the embedding one, the loss
    one backward. Beside them the loss's three fp32 numbers a token, and the gradients of key/value
    weights that several ranks hold.
    """
    model, tp, tokens = setting.config.model, setting.layout.tp, setting.tokens
    if tp == 1:
        return 0.0
    line = tokens * setting.width * model.hidden_size
    again = setting.config.train.activation_checkpointing
    size = setting.num_blocks(stage) * (4 + again) * line
    if stage == 0:
        size += line
    if stage == setting.layout.pp - 1:
        size += line + 3 * FP32 * tokens
    if tp > model.kv_heads:
        # One sum over all ranks, each set of copies in its own place.
        rows = 2 * model.head_dim * model.kv_heads
        bias = model.architecture == "bloom"
        copied = setting.width * rows * (model.hidden_size + bias)
        size += setting.num_blocks(stage) * copied
    return all_reduce(size, tp) * setting.num_micro_batches


def _pipeline(setting: Setting, stage: int) -> tuple[float, float]:
    """Bytes sent to other stages, and gathered among the ranks of this one."""
    layout, model = setting.layout, setting.config.model
    line = setting.tokens * setting.width * model.hidden_size
    sends_on, sends_back = stage < layout.pp - 1, stage > 0
    shared = layout.tp > 1 and setting.pipeline_partitioned
    size = line / layout.tp if shared else line
    own = (sends_on + sends_back) * size
    # Forward, a stage puts its input together; backward, the output that it had sent on (of which
    # it kept its share only) and that output's gradient.
    times = (sends_back + 2 * sends_on) * shared
    partial = times * all_gather(line, layout.tp)
    return own * setting.num_micro_batches, partial * setting.num_micro_batches


def _tied(setting: Setting, stage: int) -> float:
    layout, model = setting.layout, setting.config.model
    if not model.tied_embeddings or layout.pp == 1 or stage not in (0, layout.pp - 1):
        return 0.0
    share = -(-vocab_size(model) // layout.tp)
    return all_reduce(FP32 * share * model.hidden_size, 2)


def _data(setting: Setting, parameters: Sequence[HeldParameter]) -> tuple[float, float]:
    """Gradients and weights over the data-parallel ranks.

    Gradients go in fp32 (`communication_data_type`). Stages 0 and 1 reduce them once a step, stages
    2 and 3 once a micro-batch. DeepSpeed's stage 1 and 2 all-reduce whole buckets, though each rank
    needs its part only.
    """
    ranks, zero = setting.layout.dp, setting.zero
    if ranks == 1:
        return 0.0, 0.0
    numel = sum(held.numel for held in parameters)
    if zero.stage == 0:
        return all_reduce(FP32 * numel, ranks), 0.0
    if zero.stage == 3:
        return _stage_3(setting, parameters)
    flat = sum(flat_sizes(setting, parameters))
    size = FP32 * (flat if setting.bf16_optimizer else numel)
    reduced = all_reduce(size, ranks) if zero.all_reduced or setting.bf16_optimizer else size
    times = setting.num_micro_batches if zero.stage == 2 else 1
    return times * reduced, all_gather(setting.width * flat, ranks)


def _stage_3(setting: Setting, parameters: Sequence[HeldParameter]) -> tuple[float, float]:
    ranks, times = setting.layout.dp, setting.num_micro_batches
    found = stage_3_gathers(setting, parameters)
    whole = {held.name: padded(held.numel, ranks) for held in parameters}
    gathered = sum(
        size * (1 if name in found.persistent else times * found.counts[name])
        for name, size in whole.items()
    )
    gradients = all_gather(FP32 * sum(whole.values()), ranks) * times
    return gradients, all_gather(setting.width * gathered, ranks)
