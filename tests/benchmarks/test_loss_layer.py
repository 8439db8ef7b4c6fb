"""The benchmark of the loss layer, and what it has to show of memory and exactness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.benchmarks.loss_layer import LossBenchmark, benchmark_loss, main


def test_the_script_measures_and_stores_what_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loss.json"
    sizes = ["--vocab-size", "5000", "--hidden-size", "64", "--num-tokens", "1024"]
    options = [*sizes, "--precision", "fp32", "--repeats", "2", "--json", str(path)]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    asked = {"vocab_size": 5000, "hidden_size": 64, "num_tokens": 1024, "precision": "fp32"}
    assert asked.items() <= result.items()
    counts = {name: len(times) for name, times in result["seconds"].items()}
    assert counts == {"plain": 2, "ours": 2, "torch": 2}
    assert max(result["difference"]["ours"].values()) <= 1e-5
    # The plain formula holds at least the fp32 logits and their softmax.
    assert result["bytes"]["plain"][0] > 2 * 4 * 5000 * 1024
    table = [line.split("|")[1].strip() for line in done.output.splitlines() if line[0] == "|"]
    assert table[2:] == ["plain", "ours", "torch"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_large_vocabulary_takes_a_quarter_of_the_plain_memory(precision: str) -> None:
    """At 250,880 ids of width 1,024 and 4,096 tokens; the plain formula takes 12 GiB."""
    settings = LossBenchmark(precision=precision, repeats=1, memory_repeats=1)
    result = benchmark_loss(settings)
    assert result["memory_ratio"]["ours"] <= 0.25
    if precision == "fp32":
        assert max(result["difference"]["ours"].values()) <= 1e-5
