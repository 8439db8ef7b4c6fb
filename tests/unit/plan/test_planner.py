"""The plan's layout: every part of the model and every sample has its ranks; the command."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from alibi_lm.cli.main import main
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.plan.planner import Plan, make_plan

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
BLOOM = next(path for path in CONFIGS if path.name == "bloom-176b.yaml")
DEMO = next(path for path in CONFIGS if path.name == "demo.yaml")
ZERO_1 = "deepspeed.zero_optimization.stage=1"


def stated_ranks(path: Path) -> int:
    """The ranks that a config's first lines name; the demo's are the Makefile's."""
    stated = re.search(r"^# Ranks: (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(stated[1]) if stated else 2


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def owned(plan: Plan) -> int:
    """Parameters that the ranks of one data-parallel place count, all together."""
    ranks = range(plan.run.layout.num_ranks)
    places = {rank: plan.run.layout.place(rank) for rank in ranks}
    return sum(
        held.owned
        for rank, place in places.items()
        if place.data == 0
        for held in plan.rank(rank).parameters
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_has_a_plan(path: Path) -> None:
    ranks = stated_ranks(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = make_plan(path, [], ranks)
    assert owned(plan) == plan.num_parameters
    result = command(path, "--num-ranks", ranks)
    assert result.exit_code == 0, result.output
    assert f"{plan.num_parameters:,} parameters" in result.output
    # KiB; even a small model's own tensors would be more.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize(
    ("tp", "pp", "overrides"),
    [
        (4, 12, []),
        (8, 12, ["model.tied_embeddings=false"]),
        (2, 1, ["model.vocab_size=250881"]),
        (8, 6, ["model.num_kv_heads=2", "model.vocab_size=101"]),
        (4, 3, ["model.architecture=mpt", "model.position=t5"]),
        (4, 3, ["model.position=learned", "model.max_positions=4096"]),
        (4, 3, ["model.position=alibi_learned", "model.scaling={kind: linear, factor: 2}"]),
    ],
)
def test_the_ranks_of_a_layout_hold_the_model_once(tp: int, pp: int, overrides: list[str]) -> None:
    overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}", ZERO_1, *overrides]
    plan = make_plan(BLOOM, overrides, tp * pp * 2)
    assert owned(plan) == plan.num_parameters
    model, layout = plan.run.config.model, plan.run.layout
    stage_0 = [plan.rank(rank) for rank in layout.tensor_groups()[0]]
    assert [head for part in stage_0 for head in part.heads] == list(range(model.num_heads))
    assert {head for part in stage_0 for head in part.kv_heads} == set(range(model.kv_heads))
    if model.position == "alibi":
        slopes = [slope for part in stage_0 for slope in part.slopes or ()]
        assert tuple(slopes) == alibi_slopes(model.num_heads)
    stages = [plan.rank(ranks).layers for ranks in layout.pipeline_groups()[0]]
    assert [layer for stage in stages for layer in stage] == list(range(model.num_layers + 2))
    places = [plan.rank(rank).samples(step=3) for rank in layout.data_groups()[0]]
    samples = sorted(s for place in places for batch in place for s in batch)
    batch = plan.run.config.train.global_batch_size
    assert samples == list(range(3 * batch, 4 * batch))


def test_a_pipeline_holds_fewer_micro_batches_the_later_its_stage() -> None:
    batch = ["train.global_batch_size=4", "train.micro_batch_size=1"]
    overrides = ["parallel.tp=1", "parallel.pp=7", *batch]
    plan = make_plan(BLOOM, overrides, 7)
    held = [plan.rank(rank).activations.in_flight for rank in range(7)]
    assert held == [4, 4, 4, 4, 3, 2, 1]
    assert plan.bubble == 6 / 4


def test_the_command_says_where_everything_is() -> None:
    layout = ["parallel.tp=4", "parallel.pp=12", ZERO_1, "train.micro_batch_size=2"]
    output = command(BLOOM, *layout, "--num-ranks", 384).output
    assert "384 ranks (12 pipeline stages x 8 data-parallel x 4 tensor-parallel)" in output
    assert re.search(r"^ranks 0-31 +stage 0: embedding, blocks 0-4$", output, re.MULTILINE)
    assert re.search(r"^ranks 352-383 +stage 11: blocks 65-69, head$", output, re.MULTILINE)
    assert re.search(r"^ranks 3, 7, \.\.\. +heads 84-111, slopes 0\.169282 \.\.\. ", output, re.M)
    assert re.search(r"^ranks 4-7, 36-39, \.\.\. +samples 2-3 of a step", output, re.MULTILINE)
    assert "bubble      8.59%" in output
    listed = command(BLOOM, *layout, "--num-ranks", 384, "--slopes").output
    for slope in alibi_slopes(112):
        assert f"{slope:.6g}" in listed


def test_one_rank_in_full() -> None:
    layout = ["parallel.tp=4", "parallel.pp=12", ZERO_1]
    output = command(BLOOM, *layout, "--num-ranks", 384, "--rank", 383).output
    assert "rank 383 of 384: stage 11, data-parallel place 7, tensor-parallel place 3" in output
    assert "heads    84-111" in output
    assert re.search(r"embedding\.weight +899,153,920$", output, re.MULTILINE)


def test_an_assumed_vocabulary_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without prepared data
    assert "50,304 token ids assumed" in command(DEMO, "--num-ranks", 2).output
    said = command(DEMO, "--num-ranks", 2, "model.vocab_size=4096").output
    assert "assumed" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-ranks", 2, "parallel.tp=3"], "parallel.tp = 3: does not divide"),
        (["--num-ranks", 8, "parallel.pp=8"], "exceeds model.num_layers"),
        (["--num-ranks", 3], "train.global_batch_size"),
        (
            ["--num-ranks", 2, "parallel.pp=2", "deepspeed.zero_optimization.stage=3"],
            "deepspeed.zero_optimization.stage = 3: splits gradients",
        ),
        (["--num-ranks", 2, "--rank", 2], "--rank = 2: the run has 2 ranks"),
    ],
)
def test_what_training_would_refuse_is_refused(arguments: list[object], words: str) -> None:
    result = command(DEMO, *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_readme_shows_real_output() -> None:
    text = (BLOOM.parents[1] / "docs/parallelism.md").read_text(encoding="utf-8")
    section = text.partition("## Planning a layout")[2].partition("\n## ")[0]
    shown = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    options = re.findall(r"(?:train|deepspeed|parallel)\.\S+=\S+", section.partition("384")[2])
    output = command(BLOOM, "--num-ranks", 384, *options).output
    lines = {line.strip() for line in output.splitlines()}
    shown = [line for line in shown if line not in options and "--rank" not in line]
    assert len(shown) == 5
    assert set(shown) <= lines
