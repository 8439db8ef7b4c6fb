"""The benchmark of the loss layer, and what it has to show of memory and exactness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from alibi_lm.bench.loss import LossBenchmark, benchmark_loss
from alibi_lm.cli import main


def test_everything_is_measured_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = LossBenchmark(5000, 64, 1024, "fp32", repeats=2, memory_repeats=1)
    result = benchmark_loss(settings, tmp_path / "new" / "loss.json")
    assert json.loads((tmp_path / "new" / "loss.json").read_text()) == result
    assert {way: len(times) for way, times in result["seconds"].items()} == {
        "plain": 2, "ours": 2, "torch": 2,
    }  # fmt: skip
    assert max(result["difference"]["ours"].values()) <= 1e-5
    # The plain way holds at least the fp32 logits and their softmax.
    assert result["bytes"]["plain"][0] > 2 * 4 * 5000 * 1024
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table[3:]] == ["plain", "ours", "torch"]


def test_the_command_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    sizes = ["--vocab-size", "500", "--hidden-size", "16", "--num-tokens", "64"]
    options = [*sizes, "--precision", "bf16", "--repeats", "1", "--json", str(path)]
    done = CliRunner().invoke(main, ["bench", "loss", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    asked = {"vocab_size": 500, "hidden_size": 16, "num_tokens": 64, "precision": "bf16"}
    assert asked.items() <= found.items()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_large_vocabulary_takes_a_quarter_of_the_plain_ways_memory(precision: str) -> None:
    """At 250,880 ids of width 1,024 and 4,096 tokens; the plain way takes 12 GiB."""
    settings = LossBenchmark(precision=precision, repeats=1, memory_repeats=1)
    result = benchmark_loss(settings)
    assert result["memory_ratio"]["ours"] <= 0.25
    if precision == "fp32":
        assert max(result["difference"]["ours"].values()) <= 1e-5
