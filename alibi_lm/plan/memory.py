"""Bytes that a rank holds: weights and optimizer states by ZeRO stage, and activations.

States follow DeepSpeed as this project sets it: gradients are summed up and reduced in fp32, so
stage 1 in bf16 keeps fp32 gradients of all its weights (BF16_Optimizer). For the textbook's 16,
4 + 12/N, 2 + 14/N and 16/N bytes a parameter see Rajbhandari et al., "ZeRO" (2020), figure 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alibi_lm.model.cross_entropy import (
    LOGITS_AT_ONCE,
    LOGITS_KEPT,
    ROWS_AT_ONCE,
    SOFTMAX_AT_ONCE,
)
from alibi_lm.model.layers import vocab_size
from alibi_lm.model.vocab_parallel_cross_entropy import SPLIT_LOGITS_AT_ONCE
from alibi_lm.plan.gathers import Gathers, gathers
from alibi_lm.plan.parameters import HeldParameter
from alibi_lm.plan.setting import Setting

FP32 = 4
_ALL_REDUCE_AT_ONCE = 500_000_000
"""Elements after which DeepSpeed closes an all-reduce without ZeRO."""


@dataclass(frozen=True)
class States:
    """Bytes of a rank that stay from step to step, and what the backward pass adds to them."""

    weights: int
    """What forward and backward use; ZeRO-3: the rank's parts."""
    gathered: int
    """ZeRO-3: the most that is whole at once."""
    gradients: int
    master: int
    """fp32 weights that the optimizer updates; without ZeRO the weights themselves."""
    moments: int
    """Adam's two."""
    buffers: int
    """What gradients are collected in to be reduced."""
    on_host: int = 0
    """Of these, bytes that CPU offload keeps in the host's memory."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        held = self.weights + self.gathered + self.gradients + self.master + self.moments
        return held + self.buffers - self.on_host


def padded(numel: int, multiple: int) -> int:
    """`numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def group_sizes(parameters: Sequence[HeldParameter]) -> list[int]:
    """Elements of the optimizer's two groups: matrices, then vectors."""
    sizes = [
        sum(held.numel for held in parameters if held.is_matrix is matrix)
        for matrix in (True, False)
    ]
    return [size for size in sizes if size]


def flat_sizes(setting: Setting, parameters: Sequence[HeldParameter]) -> list[int]:
    """The same in the flat buffers of stages 1 and 2, each a multiple of twice the ranks."""
    return [padded(size, 2 * setting.layout.dp) for size in group_sizes(parameters)]


def stage_3_part(setting: Setting, parameters: Sequence[HeldParameter]) -> int:
    """Elements of a rank's parts under ZeRO-3; each parameter is split by itself."""
    return sum(padded(held.numel, setting.layout.dp) for held in parameters) // setting.layout.dp


def stage_3_gathers(setting: Setting, parameters: Sequence[HeldParameter]) -> Gathers:
    """What ZeRO-3 gathers of a rank's parameters in a micro-batch."""
    config = setting.config
    again = config.train.activation_checkpointing
    return gathers(parameters, setting.zero, config.model.tied_embeddings, again)


def states(setting: Setting, parameters: Sequence[HeldParameter], place: int) -> States:
    """Bytes of weights and optimizer states of a rank that holds these parameters.

    `place` is its data-parallel one.
    """
    stage, width, ranks = setting.zero.stage, setting.width, setting.layout.dp
    numel = sum(held.numel for held in parameters)
    if stage == 0:
        # fp32 only. All-reduced gradients are copied together, a closed portion at a time.
        largest = max(held.numel for held in parameters)
        copied = min(numel, _ALL_REDUCE_AT_ONCE + largest)
        return States(FP32 * numel, 0, FP32 * numel, 0, 2 * FP32 * numel, FP32 * copied)
    if stage == 3:
        part = stage_3_part(setting, parameters)
        live = stage_3_gathers(setting, parameters).most_live
        bucket = FP32 * setting.zero.reduce_bucket_size * setting.zero.contiguous_gradients
        result = States(width * part, width * live, FP32 * part, FP32 * part, 2 * FP32 * part,
                        bucket)  # fmt: skip
        return _offloaded(setting, result, FP32 * part)
    flat = sum(flat_sizes(setting, parameters))
    part = flat // ranks
    gradients, buffers = _flat_gradients(setting, parameters, place)
    result = States(width * flat, 0, gradients, FP32 * part, 2 * FP32 * part, buffers)
    return _offloaded(setting, result, FP32 * part)


def _flat_gradients(
    setting: Setting, parameters: Sequence[HeldParameter], place: int
) -> tuple[int, int]:
    """Bytes of gradients and of their buckets under stages 1 and 2."""
    width, zero, ranks = setting.width, setting.zero, setting.layout.dp
    numel = sum(held.numel for held in parameters)
    flat = sum(flat_sizes(setting, parameters))
    if setting.bf16_optimizer:
        # fp32 of all weights, and beside them bf16 ones, which are set to zero, not let go of.
        # Small groups are copied together for the all-reduce; a large first one goes alone.
        groups = group_sizes(parameters)
        together = len(groups) > 1 and groups[0] <= _ALL_REDUCE_AT_ONCE
        own = 0 if zero.immediate_grad_update else width * numel
        return FP32 * flat + own, FP32 * flat * together
    # Under a pipeline DeepSpeed never overlaps, and makes a second bucket beside the first.
    buckets = (2 if setting.layout.pp > 1 else 1 + zero.overlap_comm) * zero.contiguous_gradients
    # In 16 bits the rank's own part is one fp32 buffer; in fp32, all parameters that reach into it.
    part = FP32 * (flat // ranks if width < FP32 else _reaching_in(setting, parameters, place))
    if zero.stage == 2:
        # fp32 adds up two such sets where a step has several micro-batches.
        sets = 2 if width == FP32 and setting.num_micro_batches > 1 else 1
        # And one parameter's that waits for a full bucket to be reduced.
        waiting = width * max(held.numel for held in parameters)
        return sets * part + waiting, width * zero.reduce_bucket_size * buckets
    # Sums in fp32 of all weights, and the part, which is filled while they are still there.
    return FP32 * numel + part, FP32 * zero.reduce_bucket_size * buckets


def _reaching_in(setting: Setting, parameters: Sequence[HeldParameter], place: int) -> int:
    """Elements of the parameters of which at least one element is in the rank's flat parts."""
    total = 0
    for matrix in (True, False):
        group = [held.numel for held in parameters if held.is_matrix is matrix]
        size = padded(sum(group), 2 * setting.layout.dp) // setting.layout.dp
        low, end = place * size, 0
        for numel in group:
            start, end = end, end + numel
            if start < low + size and end > low:
                total += numel
    return total


def _offloaded(setting: Setting, held: States, gradients: int) -> States:
    on_host = 0
    if setting.zero.offload_optimizer:
        on_host += held.master + held.moments + gradients
    if setting.zero.offload_param:
        on_host += held.weights
    gradients = max(held.gradients, gradients) if setting.zero.offload_optimizer else held.gradients
    return States(held.weights, held.gathered, gradients, held.master, held.moments, held.buffers,
                  on_host)  # fmt: skip


@dataclass(frozen=True)
class Activations:
    """Bytes of a rank that the forward pass leaves for the backward pass."""

    block: int
    """One block's, of one micro-batch, nothing recomputed."""
    block_input: int
    """What recomputation keeps of a block instead."""
    ends: int
    """Those of the embedding and of the final norm and loss, of one micro-batch."""
    num_blocks: int
    in_flight: int
    """Micro-batches held at once."""
    recompute: bool
    loss: int
    """What the loss needs for a moment: logits, their gradients, and sums."""

    @property
    def micro_batch(self) -> int:
        """Kept of one micro-batch."""
        kept = self.block_input if self.recompute else self.block
        return self.num_blocks * kept + self.ends

    @property
    def total(self) -> int:
        """The most held at once: of all micro-batches in flight, and of the work on the last."""
        # The loss comes before the first block is computed again; the larger of the two counts.
        working = max(self.loss, self.block) if self.recompute else self.loss
        return self.in_flight * self.micro_batch + working


def block_activations(setting: Setting) -> int:
    """Bytes that a block saves for its backward pass, for one micro-batch.

    With s tokens, width h, t tensor-parallel ranks and k key/value width over h, values of w bytes:
    s w h (4 + (10 + 2 k) / t), of which 4 are the inputs of two norms and of two column-split
    linears, and over t: queries, keys, values, the mixed values, and the GELU's input and output.
    Beside them 4 bytes a token and head (log-sum-exp) and 4 w a token (means and deviations of the
    norms). Korthikanti et al. (2022), section 4, count the same in 16 bits, s h (8 + 24 / t),
    without the masks of dropout, which there is none of here, and without the scores.
    Scores are not kept: the kernel is fused, or works in chunks that are computed again.
    """
    model, tp = setting.config.model, setting.layout.tp
    tokens, width = setting.tokens, setting.width
    hidden = model.hidden_size
    # With fewer key/value heads than ranks, each rank holds one.
    kv_heads = max(1, model.kv_heads // tp)
    keys = 2 * kv_heads * model.head_dim
    split = (2 * hidden + 8 * hidden) // tp + keys
    heads = model.num_heads // tp
    statistics = 4
    return tokens * (width * (4 * hidden + split + statistics) + FP32 * heads)


def activations(setting: Setting, stage: int) -> Activations:
    """What a rank of a pipeline stage holds of its micro-batches."""
    config, tokens, width = setting.config, setting.tokens, setting.width
    line = tokens * width * config.model.hidden_size
    ends, loss = 0, 0
    if stage == 0:
        ends += 8 * tokens + line * (config.model.architecture == "bloom")
    if stage == setting.layout.pp - 1:
        ends += 8 * tokens + 2 * line
        loss = loss_bytes(setting)
    return Activations(
        block=block_activations(setting),
        block_input=line,
        ends=ends,
        num_blocks=setting.num_blocks(stage),
        in_flight=setting.in_flight(stage),
        recompute=config.train.activation_checkpointing,
        loss=loss,
    )


def loss_bytes(setting: Setting) -> int:
    """The most that the loss holds at once (`model/loss.py`, `model/split_loss.py`).

    Logits of a portion of the tokens, or of all where these are kept, a portion's gradients, fp32
    values of the softmax, the fp32 sum of the matrix's gradient with one portion's product, and
    the gradient of the hidden states.
    """
    tp, width, hidden = setting.layout.tp, setting.width, setting.config.model.hidden_size
    share = -(-vocab_size(setting.config.model) // tp)
    at_once = SPLIT_LOGITS_AT_ONCE if tp > 1 else LOGITS_AT_ONCE
    rows = min(setting.tokens, max(ROWS_AT_ONCE, at_once // share))
    softmax = rows * share if tp > 1 else min(rows * share, max(SOFTMAX_AT_ONCE, share))
    portions = math.ceil(setting.tokens / rows)
    matrix = share * hidden
    sums = FP32 * matrix + width * matrix if portions > 1 or tp > 1 else width * matrix
    keeps = tp == 1 and setting.tokens * share <= LOGITS_KEPT
    logits = width * share * (rows + (setting.tokens if keeps else rows))
    return logits + FP32 * softmax + sums + width * setting.tokens * hidden
