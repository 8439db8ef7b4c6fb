"""A converted checkpoint is used as any other: runs, evals and exports start from it."""

from pathlib import Path

import pytest
from comparing import assert_same_states, curve
from launching import REPOSITORY, alibi_lm, error_lines, launch, write_config

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.config_loading import to_yaml


def test_a_run_of_two_ranks_goes_on_from_a_converted_checkpoint(tmp_path: Path) -> None:
    config, first = write_config(tmp_path), tmp_path / "run"
    launch(config, "parallel.tp=2")
    second = tmp_path / "second"
    step = "checkpoints/step_00000005"
    (second / step).parent.mkdir(parents=True)
    alibi_lm("checkpoint", "convert", first / step, second / step, "--shards", "3")
    assert_same_states(first / step, second / step, tolerance=0)
    assert len(open_checkpoint(second).meta["shards"]) == 3
    for run in (first, second):
        relative, absolute = open_checkpoint(run).meta["config_folders"]
        assert (run / relative).resolve() == Path(absolute) == REPOSITORY

    done = launch(config, f"run.dir={second}", ranks=0)
    assert "from step_00000005 (5 steps done)" in done.stdout
    for ours, theirs in zip(curve(second), curve(first)[5:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert_same_states(first, second, tolerance=1e-5)

    weights = tmp_path / "third/checkpoints/step_00000010"
    weights.parent.mkdir(parents=True)
    alibi_lm("checkpoint", "convert", first, weights, "--weights-only")
    suite = tmp_path / "suite.yaml"
    suite.write_text(to_yaml({"perplexity": {"lengths": [32, 64], "max_tokens": 640}}))
    alibi_lm("eval", "perplexity", weights, "--suite", suite)
    alibi_lm("export", weights, tmp_path / "exported", "--no-tokenizer")
    refused = launch(config, f"run.dir={tmp_path / 'third'}", "train.num_steps=12", ranks=0, code=2)
    assert "holds no optimizer state to resume from" in error_lines(refused)[0]
    started = launch(
        config, f"run.dir={tmp_path / 'fourth'}", f"train.init_from={weights}", ranks=0
    )
    assert "with the weights of" in started.stdout
