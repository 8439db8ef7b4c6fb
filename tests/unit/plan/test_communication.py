"""Bytes that a rank sends, worked out by hand for models of a few numbers."""

from __future__ import annotations

from typing import Any

import pytest

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.parallel.layout import Layout
from alibi_lm.plan.communication import Sent, all_gather, all_reduce, sent
from alibi_lm.plan.memory import zero3_gathers
from alibi_lm.plan.parameters import HeldParameter, held_parameters
from alibi_lm.plan.planned_run import PlannedRun, ZeroSettings

TOKENS = 2 * 32  # of a micro-batch
HIDDEN = 64
LINE = TOKENS * HIDDEN * 4  # bytes of the residual stream of a micro-batch in fp32
TWO = [HeldParameter("matrix", 10, 10, True), HeldParameter("bias", 3, 3, False)]
ZERO: dict[str, Any] = {
    "stage": 0,
    "reduce_bucket_size": 1000,
    "contiguous_gradients": True,
    "overlap_comm": False,
    "all_reduced": True,
    "persistence_threshold": 100,
    "model_persistence_threshold": 1000,
    "prefetch_bucket_size": 0,
    "max_live_parameters": 10**9,
    "max_reuse_distance": 0,
    "offload_optimizer": False,
    "offload_param": False,
    "immediate_grad_update": False,
}


def planned_run(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    zero: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    partitioned: bool = True,
    **train: Any,
) -> PlannedRun:
    """Three blocks of width 64, two sequences of 32 tokens at a time, one micro-batch a step."""
    shape = {"num_layers": 3, "hidden_size": HIDDEN, "num_heads": 4, "vocab_size": 203}
    steps = {
        "sequence_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 2 * dp,
        "precision": "fp32",
    }
    raw = {
        "run": {"dir": "none"},
        "data": {"corpora": [{"prefix": "none"}]},
        "model": shape | (model or {}),
        "train": steps | train,
    }
    layout, settings = Layout(dp, tp, pp), ZeroSettings(**ZERO | (zero or {}))
    return PlannedRun(build(Config, raw), layout, settings, partitioned)


def of(run: PlannedRun, stage: int = 0) -> Sent:
    """What the first rank of a stage sends."""
    rank = next(
        rank for rank in range(run.layout.num_ranks) if run.layout.place(rank).stage == stage
    )
    return sent(run, stage, held_parameters(run, rank))


def test_rings_send_each_part_once_to_every_other_rank() -> None:
    assert [all_reduce(120, ranks) for ranks in (1, 2, 4)] == [0, 120, 180]
    assert [all_gather(120, ranks) for ranks in (1, 2, 4)] == [0, 60, 90]


def test_one_rank_sends_nothing() -> None:
    assert of(planned_run()) == Sent()
    assert of(planned_run()).total == 0


def test_the_total_is_that_of_every_kind() -> None:
    assert Sent(1, 10, 100, 1000, 10000, 100000).total == 111111


# ---- tensor parallel ----------------------------------------------------------------------------

ALONE = (3 * 4 + 2) * LINE + 3 * 4 * TOKENS
"""Three blocks of four sums, the embedding's and the loss's, and three numbers a token."""


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (planned_run(tp=2), ALONE),
        (planned_run(tp=4), 1.5 * ALONE),
        (planned_run(tp=2, global_batch_size=6), 3 * ALONE),
        (planned_run(tp=2, activation_checkpointing=True), ALONE + 3 * LINE),
        # Key/value weights that both ranks hold: 2 x 16 rows, of 64 columns and for BLOOM a bias.
        (planned_run(tp=2, model={"num_kv_heads": 1}), ALONE + 3 * 4 * 32 * 64),
        (planned_run(tp=2, model={"num_kv_heads": 1, "architecture": "bloom"}),
         ALONE + 3 * 4 * 32 * 65),
        (planned_run(tp=4, model={"num_kv_heads": 2}), 1.5 * (ALONE + 3 * 4 * 64 * 64)),
        (planned_run(tp=2, model={"num_kv_heads": 2}), ALONE),
    ],
)  # fmt: skip
def test_sums_of_activations_over_tensor_parallel_ranks(run: PlannedRun, expected: float) -> None:
    assert of(run).tensor == expected


def test_half_precision_halves_activations_and_not_the_losss_numbers() -> None:
    zero = {"stage": 1}
    assert (
        of(planned_run(tp=2, precision="bf16", zero=zero)).tensor == 14 * LINE / 2 + 3 * 4 * TOKENS
    )


def test_a_stage_sums_its_own_blocks_and_the_ends_their_own_layers() -> None:
    run = planned_run(tp=2, pp=3)
    blocks = [run.num_blocks(stage) for stage in range(3)]
    assert sum(blocks) == 3
    ends = [LINE, 0, LINE + 3 * 4 * TOKENS]
    for stage, (number, end) in enumerate(zip(blocks, ends, strict=True)):
        assert of(run, stage).tensor == 4 * number * LINE + end


# ---- pipeline -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stage_sends_activations_on_and_gradients_back(batches: int) -> None:
    run = planned_run(pp=3, global_batch_size=2 * batches)
    measured = [of(run, stage) for stage in range(3)]
    assert [each.pipeline for each in measured] == [batches * size * LINE for size in (1, 2, 1)]
    assert [each.pipeline_gathers for each in measured] == [0, 0, 0]


def test_tensor_parallel_ranks_send_shares_that_are_gathered() -> None:
    run = planned_run(tp=2, pp=3, global_batch_size=6)
    measured = [of(run, stage) for stage in range(3)]
    assert [each.pipeline for each in measured] == [3 * LINE / 2, 3 * LINE, 3 * LINE / 2]
    # In the middle the input, the output and its gradient are put together; each sends its half.
    gathered = [3 * times * LINE / 2 for times in (2, 3, 1)]
    assert [each.pipeline_gathers for each in measured] == gathered


def test_whole_activations_need_no_gathering() -> None:
    run = planned_run(tp=2, pp=3, partitioned=False)
    measured = [of(run, stage) for stage in range(3)]
    assert [each.pipeline for each in measured] == [LINE, 2 * LINE, LINE]
    assert [each.pipeline_gathers for each in measured] == [0, 0, 0]


def test_the_ends_sum_the_gradient_of_a_tied_matrix_once_a_step() -> None:
    tied = {"tied_embeddings": True}
    run = planned_run(tp=2, pp=3, global_batch_size=6, model=tied)
    share = 4 * 102 * HIDDEN  # half of 203 ids, rounded up
    assert [of(run, stage).tied for stage in range(3)] == [share, 0, share]
    untied = planned_run(tp=2, pp=3, model={"tied_embeddings": False})
    assert [of(untied, stage).tied for stage in range(3)] == [0, 0, 0]
    assert of(planned_run(tp=2, model=tied)).tied == 0


# ---- data parallel ------------------------------------------------------------------------------

# ZeRO-1 and 2 keep matrices and vectors in flat buffers, each a multiple of twice the ranks: over
# two ranks the 10 and 3 elements of TWO become 12 and 4, over four 16 and 8.


@pytest.mark.parametrize(
    ("run", "gradients", "weights"),
    [
        (planned_run(1, zero={"stage": 1}), 0, 0),
        (planned_run(2), 4 * 13, 0),
        (planned_run(4), 1.5 * 4 * 13, 0),
        (planned_run(2, zero={"stage": 1}), 4 * 13, 4 * 16 / 2),
        (planned_run(4, zero={"stage": 1}), 1.5 * 4 * 13, 0.75 * 4 * 24),
        (planned_run(4, zero={"stage": 1, "all_reduced": False}), 4 * 13, 0.75 * 4 * 24),
        (planned_run(4, zero={"stage": 1}, global_batch_size=16), 1.5 * 4 * 13, 0.75 * 4 * 24),
        (planned_run(4, zero={"stage": 2}, global_batch_size=16), 2 * 1.5 * 4 * 13, 0.75 * 4 * 24),
        (planned_run(4, zero={"stage": 2, "all_reduced": False}), 4 * 13, 0.75 * 4 * 24),
        # BF16_Optimizer sums its flat fp32 gradients, padding and all, and gathers bf16 weights.
        (planned_run(4, zero={"stage": 1}, precision="bf16"), 1.5 * 4 * 24, 0.75 * 2 * 24),
        (planned_run(4, zero={"stage": 1, "all_reduced": False}, precision="bf16"),
         1.5 * 4 * 24, 0.75 * 2 * 24),
        (planned_run(4, zero={"stage": 2}, precision="bf16"), 1.5 * 4 * 13, 0.75 * 2 * 24),
    ],
)  # fmt: skip
def test_gradients_and_weights_of_stages_0_to_2(
    run: PlannedRun, gradients: float, weights: float
) -> None:
    measured = sent(run, 0, TWO)
    assert (measured.gradients, measured.weights) == (gradients, weights)


@pytest.mark.parametrize("batches", [1, 2])
def test_stage_3_gathers_every_parameter_as_often_as_it_is_asked_for(batches: int) -> None:
    run = planned_run(3, zero={"stage": 3}, precision="bf16", global_batch_size=6 * batches)
    parameters = held_parameters(run, 0)
    padded = {held.name: -(-held.numel // 3) * 3 for held in parameters}
    asked = zero3_gathers(run, parameters)
    small = {held.name for held in parameters if held.numel <= 100}
    assert asked.persistent == small
    assert small < padded.keys()
    once = sum(padded[name] for name in small)
    often = sum(asked.counts[name] * padded[name] for name in padded.keys() - small)
    measured = of(run)
    assert measured.gradients == pytest.approx(batches * 4 * sum(padded.values()) * 2 / 3)
    assert measured.weights == pytest.approx(2 * (once + batches * often) * 2 / 3)
    # A block's matrices are gathered for the forward and again for the backward pass.
    assert asked.counts["blocks.1.mlp.up.weight"] == 2
