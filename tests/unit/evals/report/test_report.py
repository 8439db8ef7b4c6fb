"""The report and its pieces, complete and in parts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.evals.config import NeedleConfig, PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.report.plots import axes_of, loss_figure, perplexity_curve, png
from alibi_lm.evals.report.report import slope_rows, summary_lines, write_report
from alibi_lm.evals.report.training_metrics import Metrics, Point, read_metrics
from alibi_lm.evals.results import evaluate, run_and_store
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.evals.suite import read_suite
from alibi_lm.utils.errors import CheckpointError
from tests.unit.evals.evals_fakes import (
    EOS,
    CopyingScorer,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)

EXPORT = {
    "checkpoint": {"step": 600, "weights": "d1"},
    "settings": {"format": "mpt", "precision": "fp32", "tokenizer": True},
    "parity": {
        "tokens": "validation text of prepared/v",
        "tolerance": 1e-4,
        "logits": [
            {"length": 128, "max_difference": 1.5e-5, "max_difference_fp64": None},
            {"length": 512, "max_difference": 2.5e-5, "max_difference_fp64": None},
        ],
        "greedy_tokens_equal": 64,
        "tokenizer": {"documents_equal": 3, "tokens_equal": 4000, "class": "LlamaTokenizer"},
    },
}
VOID = {"meta", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """Checks nesting and collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def write_log(run: Path, num_points: int = 60) -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": 10 * i, "loss": 8 / (1 + i) ** 0.3, "grad_norm": 1.0, "lr": 1e-3,
         "tokens": 1000 * i, "tokens_per_second": 500.0}
        for i in range(1, num_points + 1)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    validation = [{"step": s, "losses": {"128": 3.0, "512": 2.9}} for s in (1, 2, 300)]
    text = "".join(json.dumps(line) + "\n" for line in validation)
    (run / "validation.jsonl").write_text(text)


@pytest.fixture
def step(tmp_path: Path) -> Any:
    tokenizer = WordTokenizer()
    documents = [[*tokenizer.encode(code_text(seed, 300)), EOS] for seed in range(6)]
    fake = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 128)
    fake.fake_tokenizer = tokenizer
    fake.step = 600
    return fake


def test_full_report_stands_alone(step: Any) -> None:
    write_log(step.run_folder)
    planted = PlantedLosses(lambda t, p: 2 + t * 1e-4)
    protocols = PerplexityConfig(lengths=[64, 128, 512], stride=32, fixed_targets=16)
    run_and_store(Perplexity(), NativeModel(step), protocols, planted)
    config = NeedleConfig(lengths=[128, 512], num_trials=10)
    run_and_store(Needle(), NativeModel(step), config, CopyingScorer(context=8))
    step.hf_folder.mkdir(parents=True)
    (step.hf_folder / "alibi_lm_export.json").write_text(json.dumps(EXPORT))
    page = parsed(write_report(NativeModel(step)))
    assert page.tags.count("img") == 4
    assert all(re.match(r"data:", reference) for reference in page.references)
    assert "script" not in page.tags
    text = " ".join(page.text)
    source = (step.evals_folder / "report.html").read_text()
    assert not re.search(r"https?://|url\(|@import", source)
    for words in (
        "Perplexity holds past the training length",
        "Retrieves within",
        "1.5e-05 (at most 1e-04 allowed)",
        "does not show",
        "Uses context beyond 128: no (at length 512: loss gap to the truncated-context baseline "
        "+0.0000",
        "input cut to 128 tokens",
        "Sliding windows, stride 32",
        "The last 16 tokens of each document",
        "Loss by tokens of context, in windows of 512",
        "stated number",
        "slope",
    ):
        assert words in text
    for name in ("loss", "perplexity", "needle"):
        assert (step.evals_folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_empty_report_names_the_commands(step: Any) -> None:
    text = " ".join(parsed(write_report(NativeModel(step))).text)
    for command in ("alibi-lm eval perplexity", "alibi-lm eval needle", "alibi-lm export"):
        assert f"{command} {step.run_folder}" in text
    lines = "\n".join(summary_lines(NativeModel(step)))
    assert f"alibi-lm eval perplexity {step.run_folder}" in lines
    assert "report.html" in lines


def test_an_export_is_shown_where_it_is_of_this_step(step: Any) -> None:
    step.hf_folder.mkdir(parents=True)
    (step.hf_folder / "alibi_lm_export.json").write_text(json.dumps(EXPORT))
    lines = "\n".join(summary_lines(NativeModel(step)))
    assert "1.5e-05 at 128 tokens, 2.5e-05 at 512 tokens; 64 greedy tokens equal" in lines
    step.digest = "other"
    assert "export: not made yet: alibi-lm export" in "\n".join(summary_lines(NativeModel(step)))


def test_results_of_other_weights_are_left_out(step: Any) -> None:
    planted = PlantedLosses(lambda t, p: torch.ones(t.shape))
    run_and_store(Perplexity(), NativeModel(step), PerplexityConfig(lengths=[128]), planted)
    assert "cannot tell" in " ".join(parsed(write_report(NativeModel(step))).text)
    step.digest = "other"
    assert "has not been measured" in " ".join(parsed(write_report(NativeModel(step))).text)


def test_names_are_escaped(step: Any) -> None:
    step.config.data.corpora[0].prefix = "<script>alert(1)</script>"
    page = parsed(write_report(NativeModel(step)))
    assert "script" not in page.tags


def test_summary_shows_the_table_and_the_extremes(step: Any) -> None:
    run_and_store(
        Perplexity(),
        NativeModel(step),
        PerplexityConfig(lengths=[64, 128, 512]),
        PlantedLosses(lambda t, p: 2 + t * 1e-4),
    )
    run_and_store(
        Needle(),
        NativeModel(step),
        NeedleConfig(lengths=[128, 512], num_trials=10),
        CopyingScorer(200, context=8),
    )
    lines = summary_lines(NativeModel(step))
    table = [line.split() for line in lines if re.match(r"\s+\d+ ", line)]
    assert [row[0] for row in table] == ["64", "128", "512"]
    assert any("best cell   100%" in line for line in lines)
    assert any("worst cell" in line and "length 512" in line for line in lines)
    assert "report: not written yet: alibi-lm report" in lines[-1]
    write_report(NativeModel(step))
    assert summary_lines(NativeModel(step))[-1] == f"report: {step.evals_folder / 'report.html'}"


def test_metrics_are_read_up_to_the_step_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) is None
    write_log(tmp_path)
    metrics = read_metrics(tmp_path, 200)
    assert metrics is not None
    assert [point.step for point in metrics.points] == list(range(10, 210, 10))
    assert metrics.validation_lengths == [128, 512]
    assert metrics.validation(512) == [(1, 2.9), (2, 2.9)]
    assert metrics.training_seconds == pytest.approx(20 * 1000 / 500)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 610, "lo')
    assert read_metrics(tmp_path) is not None
    path.write_text('{"step": 610, "lo\n' + whole)
    with pytest.raises(CheckpointError, match="line 1 is not JSON"):
        read_metrics(tmp_path)


def test_the_loss_figure_says_that_its_axis_is_cut() -> None:
    def note(losses: list[float]) -> str:
        points = [Point(step, loss, 0, 0.0) for step, loss in enumerate(losses, start=1)]
        figure = loss_figure(Metrics(points, {}))
        return figure.axes[0].get_title(loc="right")

    assert note([10.5, 9.0] + [3.0] * 58) == "axis cut: losses before step 3 reach 10.50"
    assert note([3.0] * 60) == ""
    assert note([10.5, 9.0]) == ""


@pytest.mark.parametrize(
    "values", [(7.0, 6.0, 5.0), (5.0, 6.0, 7.0), (6.0, 5.0, 6.0), (5.0, 6.0, 5.0), (5.0, 5.0, 6.0)]
)
def test_values_and_the_legend_lie_off_the_red_line_and_the_curve(
    values: tuple[float, ...],
) -> None:
    figure, axes = axes_of(9, 4.2)
    perplexity_curve(axes, list(zip((512, 1024, 2048), values, strict=True)), 1024, "length")
    png(figure)  # lays it out
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0
    curve, line = (drawn.get_path().transformed(drawn.get_transform()) for drawn in axes.lines)
    for text in axes.texts:
        assert not curve.intersects_bbox(text.get_window_extent(), filled=False)
        assert not line.intersects_bbox(text.get_window_extent(), filled=False)


def test_slopes_have_their_bias_fade_distance(step: Any) -> None:
    rows = slope_rows(NativeModel(step))
    assert [row["slope"] for row in rows] == [0.25, 0.0625, 0.015625, 0.00390625]
    for row in rows:
        assert np.exp(-row["slope"] * row["bias_fade_distance"]) == pytest.approx(1e-3)
    step.config.model.position = "none"
    assert slope_rows(NativeModel(step)) == []


def test_evaluate_skips_what_is_done(
    step: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = PlantedLosses(lambda t, p: 2 + t * 1e-4)
    monkeypatch.setattr(NativeModel, "scorer", lambda *_, **__: scorer)
    monkeypatch.setattr(NativeModel, "scorer", lambda *_, **__: scorer)
    suite = read_suite(None, ["perplexity.lengths=[64,128,512]", "needle.lengths=[128]",
                              "needle.num_trials=2"])  # fmt: skip
    runs: list[tuple[Any, Any, str]] = [
        (Perplexity(), suite.perplexity, "Perplexity holds"),
        (Needle(), suite.needle, "best cell"),
    ]
    for each, config, words in runs:
        first = evaluate(each, NativeModel(step), config)
        assert words in capsys.readouterr().out
        again = evaluate(each, NativeModel(step), config)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert "done before with the same settings" in lines[0]
        assert again == first
        evaluate(each, NativeModel(step), config, force=True)
        assert words in capsys.readouterr().out


def test_every_suite_of_the_repository_loads() -> None:
    suites = sorted((Path(__file__).parents[4] / "evals").glob("*.yaml"))
    assert suites
    for path in suites:
        read_suite(path)


def test_a_result_of_other_settings_is_kept(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = PlantedLosses(lambda t, p: 2 + t * 1e-4)
    monkeypatch.setattr(NativeModel, "scorer", lambda *_, **__: scorer)
    for lengths in ([64, 128, 512], [64, 128]):
        evaluate(Perplexity(), NativeModel(step), PerplexityConfig(lengths=lengths))
    folder = step.evals_folder
    newest = json.loads((folder / "perplexity.json").read_text())
    (kept,) = (folder / "perplexity").glob("*.json")
    assert newest["lengths"] == [64, 128]
    assert json.loads(kept.read_text())["lengths"] == [64, 128, 512]
    assert kept.with_name(f"{kept.stem}_perplexity.png").exists()
    assert (folder / "perplexity.png").exists()
