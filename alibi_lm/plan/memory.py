"""Bytes that a rank holds: weights and optimizer states by ZeRO stage, and activations.

States are those of DeepSpeed in this project: gradients are accumulated and reduced in fp32, so
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
from alibi_lm.plan.parameters import HeldParameter
from alibi_lm.plan.planned_run import PlannedRun
from alibi_lm.plan.zero3_gathers import Zero3Gathers, simulate_gathers

FP32 = 4
_ALL_REDUCE_AT_ONCE = 500_000_000
"""Elements after which DeepSpeed closes an all-reduce without ZeRO."""


@dataclass(frozen=True)
class States:
    """Bytes of a rank that persist between steps, and what the backward pass adds."""

    weights: int
    """Weights of the forward and backward pass; ZeRO-3: the rank's parts."""
    gathered: int
    """ZeRO-3: the most that is whole at once."""
    gradients: int
    master: int
    """fp32 weights that the optimizer updates; none without ZeRO, which updates the weights."""
    moments: int
    """Adam's two moments."""
    buffers: int
    """Buckets for reducing gradients."""
    on_host: int = 0
    """Bytes of these in host memory (CPU offload)."""

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


def flat_sizes(run: PlannedRun, parameters: Sequence[HeldParameter]) -> list[int]:
    """Their sizes in the flat buffers of stages 1 and 2, multiples of twice the ranks."""
    return [padded(size, 2 * run.layout.dp) for size in group_sizes(parameters)]


def zero3_share(run: PlannedRun, parameters: Sequence[HeldParameter]) -> int:
    """Elements of a rank's parts under ZeRO-3; each parameter is split by itself."""
    return sum(padded(held.numel, run.layout.dp) for held in parameters) // run.layout.dp


def zero3_gathers(run: PlannedRun, parameters: Sequence[HeldParameter]) -> Zero3Gathers:
    """The parameters of a rank that ZeRO-3 gathers in a micro-batch."""
    config = run.config
    again = config.train.activation_checkpointing
    return simulate_gathers(parameters, run.zero, config.model.tied_embeddings, again)


def states(run: PlannedRun, parameters: Sequence[HeldParameter], place: int) -> States:
    """Bytes of weights and optimizer states of a rank that holds these parameters.

    `place` is its data-parallel rank.
    """
    stage, width, ranks = run.zero.stage, run.width, run.layout.dp
    numel = sum(held.numel for held in parameters)
    if stage == 0:
        # fp32 only. Gradients are copied into one all-reduce buffer at a time.
        largest = max(held.numel for held in parameters)
        copied = min(numel, _ALL_REDUCE_AT_ONCE + largest)
        return States(FP32 * numel, 0, FP32 * numel, 0, 2 * FP32 * numel, FP32 * copied)
    if stage == 3:
        part = zero3_share(run, parameters)
        peak = zero3_gathers(run, parameters).peak_gathered
        bucket = FP32 * run.zero.reduce_bucket_size * run.zero.contiguous_gradients
        result = States(
            width * part, width * peak, FP32 * part, FP32 * part, 2 * FP32 * part, bucket
        )
        return _offloaded(run, result, FP32 * part)
    flat = sum(flat_sizes(run, parameters))
    part = flat // ranks
    gradients, buffers = _flat_gradients(run, parameters, place)
    result = States(width * flat, 0, gradients, FP32 * part, 2 * FP32 * part, buffers)
    return _offloaded(run, result, FP32 * part)


def _flat_gradients(
    run: PlannedRun, parameters: Sequence[HeldParameter], place: int
) -> tuple[int, int]:
    """Bytes of gradients and of their buckets under stages 1 and 2."""
    width, zero, ranks = run.width, run.zero, run.layout.dp
    numel = sum(held.numel for held in parameters)
    flat = sum(flat_sizes(run, parameters))
    if run.bf16_optimizer:
        # fp32 gradients of all weights, and bf16 ones, which are zeroed and not freed. Small
        # groups are copied together for the all-reduce; a large first one is not copied.
        groups = group_sizes(parameters)
        together = len(groups) > 1 and groups[0] <= _ALL_REDUCE_AT_ONCE
        bf16 = 0 if zero.immediate_grad_update else width * numel
        return FP32 * flat + bf16, FP32 * flat * together
    # With a pipeline DeepSpeed never overlaps, but allocates a second bucket.
    buckets = (2 if run.layout.pp > 1 else 1 + zero.overlap_comm) * zero.contiguous_gradients
    # In 16 bits the rank's part is one fp32 buffer; in fp32, all parameters that overlap it.
    part = FP32 * (flat // ranks if width < FP32 else _overlapping(run, parameters, place))
    if zero.stage == 2:
        # fp32 holds two such sets if a step has several micro-batches.
        sets = 2 if width == FP32 and run.num_micro_batches > 1 else 1
        # And the gradient of one parameter that waits for a full bucket to be reduced.
        waiting = width * max(held.numel for held in parameters)
        return sets * part + waiting, width * zero.reduce_bucket_size * buckets
    # fp32 sums for all weights, and the rank's part, filled while they still exist.
    return FP32 * numel + part, FP32 * zero.reduce_bucket_size * buckets


def _overlapping(run: PlannedRun, parameters: Sequence[HeldParameter], place: int) -> int:
    """Elements of the parameters of which at least one element is in the rank's flat parts."""
    total = 0
    for matrix in (True, False):
        group = [held.numel for held in parameters if held.is_matrix is matrix]
        size = padded(sum(group), 2 * run.layout.dp) // run.layout.dp
        low, end = place * size, 0
        for numel in group:
            start, end = end, end + numel
            if start < low + size and end > low:
                total += numel
    return total


def _offloaded(run: PlannedRun, held: States, gradients: int) -> States:
    on_host = 0
    if run.zero.offload_optimizer:
        on_host += held.master + held.moments + gradients
    if run.zero.offload_param:
        on_host += held.weights
    gradients = max(held.gradients, gradients) if run.zero.offload_optimizer else held.gradients
    return States(
        held.weights, held.gathered, gradients, held.master, held.moments, held.buffers, on_host
    )


@dataclass(frozen=True)
class Activations:
    """Bytes of a rank that the forward pass saves for the backward pass."""

    block: int
    """One block, one micro-batch, without recomputation."""
    block_input: int
    """One block with recomputation: its input."""
    ends: int
    """Embedding, final norm and loss, one micro-batch."""
    num_blocks: int
    in_flight: int
    """Micro-batches held at once."""
    recompute: bool
    loss: int
    """Temporary memory of the loss: logits, their gradients, and sums."""

    @property
    def micro_batch(self) -> int:
        """Saved for one micro-batch."""
        kept = self.block_input if self.recompute else self.block
        return self.num_blocks * kept + self.ends

    @property
    def saved(self) -> int:
        """Saved for all micro-batches in flight."""
        return self.in_flight * self.micro_batch

    @property
    def total(self) -> int:
        """The peak: all micro-batches in flight, and the work on the last."""
        # The loss precedes the first recomputed block; the larger of the two counts.
        working = max(self.loss, self.block) if self.recompute else self.loss
        return self.saved + working


def block_activations(run: PlannedRun) -> int:
    """Bytes that a block saves for its backward pass, for one micro-batch.

    With s tokens, width h, t tensor-parallel ranks and k key/value width over h, values of w bytes:
    s w h (4 + (10 + 2 k) / t), of which 4 are the inputs of two norms and of two column-split
    linears, and over t: queries, keys, values, the mixed values, and the GELU's input and output.
    Beside them 4 bytes a token and head (log-sum-exp) and 4 w a token (means and deviations of the
    norms). Korthikanti et al. (2022), section 4, count the same in 16 bits, s h (8 + 24 / t),
    without dropout masks, as there is no dropout here, and without the scores. Scores
    are not saved: the kernel is fused, or recomputes them in chunks.
    """
    model, tp = run.config.model, run.layout.tp
    tokens, width = run.tokens, run.width
    hidden = model.hidden_size
    # With fewer key/value heads than ranks, each rank holds one.
    kv_heads = max(1, model.kv_heads // tp)
    keys = 2 * kv_heads * model.head_dim
    split = (2 * hidden + 8 * hidden) // tp + keys
    heads = model.num_heads // tp
    statistics = 4
    return tokens * (width * (4 * hidden + split + statistics) + FP32 * heads)


def activations(run: PlannedRun, stage: int) -> Activations:
    """Activations of a rank of a pipeline stage."""
    config, tokens, width = run.config, run.tokens, run.width
    line = tokens * width * config.model.hidden_size
    ends, loss = 0, 0
    if stage == 0:
        ends += 8 * tokens + line * (config.model.architecture == "bloom")
    if stage == run.layout.pp - 1:
        ends += 8 * tokens + 2 * line
        loss = loss_bytes(run)
    return Activations(
        block=block_activations(run),
        block_input=line,
        ends=ends,
        num_blocks=run.num_blocks(stage),
        in_flight=run.in_flight(stage),
        recompute=config.train.activation_checkpointing,
        loss=loss,
    )


def loss_bytes(run: PlannedRun) -> int:
    """Peak memory of the loss (`model/cross_entropy.py`, `model/vocab_parallel_cross_entropy.py`).

    Logits of a chunk of the tokens (or of all, if they are kept), a chunk's gradients, fp32 values
    of the softmax, the fp32 sum of the matrix's gradient with one chunk's product, and the gradient
    of the hidden states.
    """
    tp, width, hidden = run.layout.tp, run.width, run.config.model.hidden_size
    share = -(-vocab_size(run.config.model) // tp)
    at_once = SPLIT_LOGITS_AT_ONCE if tp > 1 else LOGITS_AT_ONCE
    rows = min(run.tokens, max(ROWS_AT_ONCE, at_once // share))
    softmax = rows * share if tp > 1 else min(rows * share, max(SOFTMAX_AT_ONCE, share))
    chunks = math.ceil(run.tokens / rows)
    matrix = share * hidden
    sums = FP32 * matrix + width * matrix if chunks > 1 or tp > 1 else width * matrix
    keeps = tp == 1 and run.tokens * share <= LOGITS_KEPT
    logits = width * share * (rows + (run.tokens if keeps else rows))
    return logits + FP32 * softmax + sums + width * run.tokens * hidden
