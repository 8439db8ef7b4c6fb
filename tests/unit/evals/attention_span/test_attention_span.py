"""Horizons as an eval, and the scorer that uses them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.evals.attention_span.evaluation import AttentionSpan, TrueSpans
from alibi_lm.evals.config import AttentionSpanConfig, PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.report import report
from alibi_lm.evals.results import evaluate, run_and_store, shown
from alibi_lm.evals.suite import read_suite
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.pruning.bounds import DEFAULT_EPSILON
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import VOCAB_SIZE, fake_step, write_documents


def model(**settings: Any) -> Decoder:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    return Decoder(ModelConfig(**{**shape, **settings})).eval()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 9000)
    return write_documents(tmp_path / "text", [tokens[:5000].tolist(), tokens[5000:].tolist()])


@pytest.fixture
def step(tmp_path: Path, corpus: Path) -> Any:
    return fake_step(tmp_path, [corpus], fake_decoder=model())


def test_equal_scores_have_the_reach_of_their_slope() -> None:
    """Queries of 0: the mass at distance d and beyond is e^(-m d), less what the start cuts off."""
    epsilon, length = 1e-4, 2500
    slopes = alibi_slopes(4)
    true = TrueSpans(torch.tensor([2000, 2499]), length, slopes, epsilon)
    q, k = torch.zeros(4, length, 8), torch.randn(4, length, 8)
    for first in (0, 1000, 2000):
        stop = min(first + 1000, length)
        true(0, first, q[:, first:stop], k[:, first:stop])
    for head, slope in enumerate(slopes):
        for place, position in enumerate((2000, 2499)):
            distances = np.arange(position + 1)
            mass = np.exp(-slope * distances)
            tail = mass[::-1].cumsum()[::-1] / mass.sum()
            assert int(true.spans[0][head, place]) == distances[tail >= epsilon].max()
    assert true.largest_scores[0].tolist() == [0, 0, 0, 0]


def test_the_eval_stores_what_is_proven_and_what_is_true(step: Any) -> None:
    result = run_and_store(
        AttentionSpan(), NativeModel(step), AttentionSpanConfig(num_tokens=6000, num_queries=20)
    )
    assert len(result.rows) == 2 * 4
    for row in result.rows:
        assert row.true_median <= row.true_max <= row.certified_max
        # The prior bound knows norms only, but counts all keys that are read; here 128 are, and
        # blocks begin to read at multiples of 64 before those.
        rest = -math.log(-math.expm1(-128 * row.slope)) / row.slope
        assert row.certified_max <= max(128, row.prior + 65 + rest)
    assert result.verdict.word == "not bounded"  # m = 1/256 needs above 3,500 tokens
    steep = [row.certified_max for row in result.rows if row.head < 3]
    assert max(steep) < 1500
    assert result.composed["true"] <= result.composed["certified"]
    assert shown(AttentionSpan(), NativeModel(step)) == result
    assert (step.evals_folder / "attention_span.png").stat().st_size > 10_000
    assert "through all layers" in "\n".join(report.summary_lines(NativeModel(step)))
    page = report.write_report(NativeModel(step)).read_text(encoding="utf-8")
    assert "How far heads read" in page
    assert f"{result.rows[0].certified_max:,}" in page
    assert result.verdict.text in page


def test_evaluating_twice_measures_once(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = AttentionSpanConfig(num_tokens=3000, num_queries=4)
    first = evaluate(AttentionSpan(), NativeModel(step), config)
    assert "certified" in capsys.readouterr().out
    assert evaluate(AttentionSpan(), NativeModel(step), config) == first
    assert "done before" in capsys.readouterr().out


def test_a_short_reach_is_called_bounded(step: Any) -> None:
    result = run_and_store(
        AttentionSpan(),
        NativeModel(step),
        AttentionSpanConfig(num_tokens=8000, num_queries=4, pruning_tolerance=1e-3),
    )
    assert result.verdict.word == "bounded"
    longest = max(row.certified_max for row in result.rows)
    assert f"{longest:,} tokens back" in result.verdict.text


def test_mistakes_are_named(tmp_path: Path, step: Any, corpus: Path) -> None:
    with pytest.raises(DataError, match="9,000 tokens"):
        run_and_store(AttentionSpan(), NativeModel(step), AttentionSpanConfig(num_tokens=9000))
    with pytest.raises(ConfigError, match=r"attention_span\.num_tokens"):
        run_and_store(AttentionSpan(), NativeModel(step), AttentionSpanConfig(num_tokens=500))
    rotary = fake_step(tmp_path, [corpus], fake_decoder=model(position="rotary"))
    with pytest.raises(ConfigError, match="rotary"):
        run_and_store(AttentionSpan(), NativeModel(rotary), AttentionSpanConfig(num_tokens=3000))
    with pytest.raises(ConfigError, match="pruning_tolerance"):
        read_suite(None, ["attention_span.pruning_tolerance=0"])
    with pytest.raises(ConfigError, match=r"perplexity\.pruning_tolerance"):
        read_suite(None, ["perplexity.pruning_tolerance=1"])


def test_the_scorer_prunes_where_the_model_allows_it() -> None:
    tokens = torch.randint(VOCAB_SIZE, (2, 3001), generator=torch.Generator().manual_seed(1))
    decoder = model()
    dense = NativeScorer(decoder, "cpu")
    scorer = NativeScorer(decoder, "cpu", pruning_tolerance=None)
    assert dense.pruning_tolerance == 0
    assert scorer.pruning_tolerance == DEFAULT_EPSILON
    assert scorer.describe()["pruning_tolerance"] == DEFAULT_EPSILON
    ours, expected = scorer.token_losses(tokens), dense.token_losses(tokens)
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, rtol=0, atol=2e-5)
    assert not torch.equal(ours, expected)
    candidates = torch.randint(VOCAB_SIZE, (2, 3, 4), generator=torch.Generator().manual_seed(2))
    answers = [s.loglikelihood_and_generate(tokens, candidates, 5) for s in (scorer, dense)]
    assert torch.equal(answers[0].generated, answers[1].generated)
    assert torch.allclose(answers[0].loglikelihoods, answers[1].loglikelihoods, atol=1e-4)


def test_a_tolerance_is_refused_where_the_model_cannot_be_pruned() -> None:
    for settings, word in (({"position": "none"}, "none"), ({"window": 100}, "window")):
        assert NativeScorer(model(**settings), "cpu", pruning_tolerance=None).pruning_tolerance == 0
        with pytest.raises(ConfigError, match=word):
            NativeScorer(model(**settings), "cpu", pruning_tolerance=1e-6)


def test_perplexity_says_its_epsilon_and_equals_the_dense_one(step: Any) -> None:
    found = {}
    for epsilon in (None, 0.0):
        config = PerplexityConfig(lengths=[128, 3000], pruning_tolerance=epsilon)
        found[epsilon] = run_and_store(Perplexity(), NativeModel(step), config)
    assert found[None].model["pruning_tolerance"] == DEFAULT_EPSILON
    assert found[0.0].model["pruning_tolerance"] == 0
    values = [[row.perplexity for row in found[e].rows] for e in (None, 0.0)]
    assert values[0][0] == values[1][0]
    assert math.isclose(values[0][1], values[1][1], rel_tol=1e-5)
