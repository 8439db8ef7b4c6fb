"""Results are addressed by what was measured; the main one is what reports and comparisons show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.evals.config import NeedleConfig, PerplexityConfig
from alibi_lm.evals.models.base import EvalOptions, NativeModel
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.report import plots
from alibi_lm.evals.report.comparison import write_comparison
from alibi_lm.evals.report.report import summary_lines, write_report
from alibi_lm.evals.results import finished, run_and_store, shown, stored
from alibi_lm.evals.retrieval.needle import Needle
from tests.unit.evals.evals_fakes import (
    EOS,
    CopyingScorer,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)

MAIN = PerplexityConfig(truncated_context_targets=None)
ONES = PlantedLosses(lambda t, p: torch.ones(t.shape))


def model(folder: Path, options: EvalOptions | None = None) -> Any:
    """A run trained at 32 tokens with a corpus of its own, and another corpus `other`."""
    if not folder.exists():
        folder.mkdir()
        random = np.random.default_rng(5)
        for name, size in (("v", 700), ("other", 900)):
            texts = [[*random.integers(2, 50, size).tolist(), EOS] for _ in range(6)]
            write_documents(folder / name, texts)
    step = fake_step(folder, [folder / "v"], 32)
    step.run_folder = folder
    return NativeModel(step, options or EvalOptions())


def measure(eval_model: Any, config: PerplexityConfig = MAIN) -> Any:
    return run_and_store(Perplexity(), eval_model, config, ONES)


def side(folder: Path) -> PerplexityConfig:
    return PerplexityConfig(
        lengths=[32, 64], corpus=str(folder / "other"), truncated_context_targets=None
    )


def test_a_side_measurement_leaves_the_main_result(tmp_path: Path) -> None:
    own = model(tmp_path / "run")
    main = measure(own)
    other = measure(own, side(tmp_path / "run"))
    folder = own.evals_folder
    assert json.loads((folder / "perplexity.json").read_text()) == main.to_json()
    (path,) = (folder / "perplexity").glob("*.json")
    assert json.loads(path.read_text()) == other.to_json()
    assert path.with_name(f"{path.stem}_perplexity.png").exists()
    assert shown(Perplexity(), own) == main
    for config, result in ((MAIN, main), (side(tmp_path / "run"), other)):
        done = finished(Perplexity(), own, config)
        assert done is not None
        assert done.result == result
    line = f"perplexity/{path.name}: lengths=[32, 64]; corpus {tmp_path / 'run' / 'other'}"
    assert f"also measured: {line}" in summary_lines(own)
    assert line in write_report(own).read_text()


def test_a_main_result_replaces_a_side_measurement_that_came_first(tmp_path: Path) -> None:
    own = model(tmp_path / "run")
    measure(own, side(tmp_path / "run"))
    main = measure(own)
    assert shown(Perplexity(), own) == main
    assert len(stored(Perplexity(), own)) == 2
    assert len(list(own.evals_folder.rglob("*.png"))) == 2
    again = measure(own)  # the same inputs: replaced, not kept twice
    assert [entry.result for entry in stored(Perplexity(), own)][0] == again
    assert len(stored(Perplexity(), own)) == 2


@pytest.mark.parametrize(
    "settings", [{"lengths": [32]}, {"scaling": {"kind": "linear", "factor": 2.0}}]
)
def test_other_lengths_and_scalings_are_side_measurements(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    own = model(tmp_path / "run")
    main = measure(own)
    measure(own, PerplexityConfig(truncated_context_targets=None, **settings))
    assert shown(Perplexity(), own) == main


def test_of_two_alike_the_newer_one_is_the_main_one(tmp_path: Path) -> None:
    own = model(tmp_path / "run")
    measure(own)
    newer = measure(own, PerplexityConfig(truncated_context_targets=None, max_tokens=900))
    assert shown(Perplexity(), own) == newer
    assert len(stored(Perplexity(), own)) == 2


def test_a_report_on_another_corpus_shows_its_results(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = model(folder)
    main, other = measure(own), measure(own, side(folder))
    asked = model(folder, EvalOptions(corpus=str(folder / "other")))
    assert shown(Perplexity(), asked) == other
    assert shown(Perplexity(), own) == main


def test_comparisons_choose_results_of_the_same_text(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    both = tmp_path / "one"
    main = measure(one)
    measure(one, side(both))
    measure(two, side(both))  # of model two there is nothing on its own corpus
    page = write_comparison([one, two], tmp_path / "page.html").read_text()
    assert page.count(f"{np.e:.3f}") == 2 * 2  # two models, at two lengths
    assert f"one: perplexity.json is left out (lengths=None; corpus {both / 'v'}" in page
    measure(two)
    page = write_comparison([one, two], tmp_path / "page.html").read_text()
    assert page.count(f"{np.e:.3f}") == 2 * len(main.lengths)


def test_comparisons_name_models_that_were_not_measured(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    measure(one)
    page = write_comparison([one, two], tmp_path / "page.html").read_text()
    assert "Nothing has been measured on: two." in page
    assert "<small>two: not measured</small>" in page


def test_shares_are_drawn_from_0_to_100_percent() -> None:
    figure = plots.lines_figure("", "x", "y", {"zeros": [(128, 0.0), (256, 0.0)]}, share=True)
    low, high = figure.axes[0].get_ylim()
    assert (round(low, 2), round(high, 2)) == (-0.03, 1.03)


def test_labels_of_lengths_do_not_overlap() -> None:
    ends = [2**n - 1 for n in range(1, 15)] + [2**n for n in range(1, 15)]
    figure = plots.lines_figure("", "x", "y", {"a": [(n, 1.0) for n in ends]})
    places = figure.axes[0].get_xticks()
    assert all(b / a > 1.3 for a, b in zip(places, places[1:], strict=False))
    assert len(places) >= 14


def test_needles_of_a_blind_model_can_be_compared(tmp_path: Path) -> None:
    tokenizer, models = WordTokenizer(), []
    texts = [[*tokenizer.encode(code_text(seed, 300)), EOS] for seed in range(4)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        step = fake_step(tmp_path / name, [write_documents(tmp_path / name / "v", texts)], 128)
        step.run_folder, step.fake_tokenizer = tmp_path / name, tokenizer
        models.append(NativeModel(step))
        config = NeedleConfig(lengths=[128, 512], num_trials=2, depths=[0.5])
        run_and_store(Needle(), models[-1], config, CopyingScorer(context_limit=1))
    page = write_comparison(models, tmp_path / "page.html").read_text()
    assert re.search(r"<td>needle \(ranking\)</td><td>one</td><td>\d+%</td>", page)
    assert (tmp_path / "page_needle.png").stat().st_size > 10_000
