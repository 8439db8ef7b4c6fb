"""The truncated-context baseline on planted truth, and its closed form on the paper's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alibi_lm.evals.config import PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.perplexity.truncated_context import (
    draw,
    truncated_context_loss,
    truncated_context_perplexity,
)
from alibi_lm.evals.perplexity.verdicts import context_verdict
from alibi_lm.evals.results import run_and_store
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import CheckpointError
from tests.unit.evals.evals_fakes import PlantedLosses, fake_step, write_documents


@pytest.mark.parametrize(
    ("length", "expected"), [(1024, 18.83), (2048, 18.40), (3072, 18.26), (15512, 18.04)]
)
def test_the_closed_form_on_the_papers_numbers(length: int, expected: float) -> None:
    """ALiBi of L = 512: 19.73 in windows of 512, 17.98 in sliding ones of stride 1."""
    assert truncated_context_perplexity(19.73, 17.98, 512, length) == pytest.approx(
        expected, abs=0.02
    )


def test_the_closed_forms_edges() -> None:
    assert truncated_context_perplexity(19.73, 17.98, 512, 512) == pytest.approx(19.73)
    with pytest.raises(ValueError, match="shorter than the context of 512"):
        truncated_context_loss(3.0, 2.9, 512, 511)


def test_the_closed_form_is_the_loss_of_a_model_of_that_context(tmp_path: Path) -> None:
    """A loss that falls with context up to L, and depends on nothing else."""
    curve = 2 + 1 / torch.arange(1, 17).double()
    planted = PlantedLosses(lambda t, p: curve[p.clamp(max=15)].expand(t.shape))
    result = measure(
        tmp_path, [[5] * 129] * 6, planted, lengths=[16, 32, 64, 128], truncated_context_length=16
    )
    first, sliding = curve.mean().item(), curve[-1].item()
    for row, baseline in zip(result.rows, result.truncated_context.rows, strict=True):
        right = truncated_context_loss(first, sliding, 16, row.length)
        assert row.loss == pytest.approx(right, rel=1e-6)
        assert baseline.truncated_context_loss == pytest.approx(right, rel=1e-6)
        assert baseline.loss_gap == pytest.approx(0, abs=1e-9)
    # Perplexity falls all the same, which is why it proves nothing.
    assert result.verdict.word == "falls"
    assert result.truncated_context.verdict.word == "no"


def measure(tmp_path: Path, documents: Any, scorer: Any, **settings: Any) -> Any:
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 32)
    defaults: dict[str, Any] = {"lengths": [32, 256], "truncated_context_targets": 5000}
    return run_and_store(
        Perplexity(), NativeModel(step), PerplexityConfig(**defaults | settings), scorer
    )


def random_documents(count: int = 12, vocab_size: int = 50) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(2, vocab_size, 300 + 7 * i).tolist() for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("position", ["alibi", "rotary", "none"])
def test_a_model_whose_receptive_field_is_l_has_no_loss_gap(
    tmp_path: Path, position: Any, dtype: torch.dtype
) -> None:
    """Two blocks of window 9 see 17 tokens back, and not 16: the cut to 16 shows."""
    config = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=50, window=9,
                         position=position, initializer_range=0.3)  # fmt: skip
    loss_gap = {}
    for context_length in (16, 17, 40):
        scorer = NativeScorer(Decoder(config, seed=1).to(dtype))
        result = measure(
            tmp_path, random_documents(6), scorer, truncated_context_length=context_length
        )
        baseline = result.truncated_context
        row = baseline.rows[-1]
        assert row.num_cut > 1000
        loss_gap[context_length] = max(abs(row.loss_gap), *map(abs, row.loss_gap_interval))
        if context_length > 16:
            assert baseline.verdict.word == "no"
    assert loss_gap[17] < 1e-6
    assert loss_gap[40] < 1e-6
    assert loss_gap[16] > 1e-5


class CopyingLosses(PlantedLosses):
    """Surprised by what follows three tokens, unless it followed them before, however far back."""

    def __init__(self) -> None:
        super().__init__(None)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """0.1 for a copy, else 3."""
        losses = torch.full((tokens.shape[0], tokens.shape[1] - 1), 3.0)
        for row, sequence in enumerate(tokens.tolist()):
            seen: set[tuple[int, ...]] = set()
            for end in range(3, len(sequence)):
                gram = tuple(sequence[end - 3 : end + 1])
                if gram in seen:
                    losses[row, end - 1] = 0.1
                seen.add(gram)
        return losses


def test_an_oracle_that_copies_from_any_distance_uses_context_beyond(tmp_path: Path) -> None:
    """Documents that repeat themselves after 120 tokens, in windows of 256, cut to 32."""
    documents = [(x[:120] * 3)[: 300 + i] for i, x in enumerate(random_documents(12, 4000))]
    baseline = measure(tmp_path, documents, CopyingLosses()).truncated_context
    row = baseline.rows[-1]
    assert row.loss_gap < -1
    assert row.loss_gap_interval[1] < -1
    assert baseline.verdict.word == "yes"
    assert "Uses context beyond 32: yes" in baseline.verdict.text
    # With nothing to copy within the context either, the same model does not.
    distinct = [list(range(i, 300 + 2 * i)) for i in range(2, 14)]
    assert measure(tmp_path, distinct, CopyingLosses()).truncated_context.verdict.word == "no"


def test_a_blind_model_does_not_and_a_broken_one_is_harmed(tmp_path: Path) -> None:
    blind = PlantedLosses(lambda t, p: 2 + t * 1e-2)
    baseline = measure(tmp_path, random_documents(), blind).truncated_context
    assert baseline.rows[-1].loss_gap == 0.0
    assert baseline.verdict.word == "no"
    broken = PlantedLosses(lambda t, p: 2 + (p >= 32) * 1.0 + t * 1e-2)
    baseline = measure(tmp_path, random_documents(), broken).truncated_context
    assert baseline.rows[-1].loss_gap > 0.5
    assert baseline.verdict.word == "no"
    assert "longer input does harm" in baseline.verdict.text
    assert [row.num_cut for row in baseline.rows][0] == 0


def test_noise_and_few_documents_cannot_tell(tmp_path: Path) -> None:
    noisy = PlantedLosses(lambda t, p: 2 + ((t * 7919 + p * 104729) % 101) / 25)
    settings = {"truncated_context_targets": 150}
    baseline = measure(tmp_path, random_documents(), noisy, **settings).truncated_context
    assert baseline.num_targets == 150
    assert baseline.verdict.word == "cannot tell"
    few = measure(tmp_path, random_documents(3), noisy).truncated_context
    assert few.verdict.word == "cannot tell"
    assert few.rows[-1].loss_gap_interval is None


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ([-0.2, -0.1], "yes"),
        ([-0.005, -0.002], "yes"),
        ([-0.005, -0.0001], "no"),
        ([0.0, 0.0], "no"),
        ([-0.009, 0.02], "no"),
        ([0.1, 0.2], "no"),
        ([-0.02, 0.01], "cannot tell"),
        (None, "cannot tell"),
    ],
)
def test_the_verdicts_words(interval: list[float] | None, word: str) -> None:
    def rows(ends: list[float] | None, share: float) -> Any:
        gap = {"loss_gap": -0.1, "loss_gap_interval": ends}
        return [SimpleNamespace(length=64, share_cut=share, **gap)]

    assert context_verdict(rows(interval, 1.0), 32).word == word
    halved = None if interval is None else [end / 2 for end in interval]
    assert context_verdict(rows(halved, 0.5), 32).word == word


def test_few_targets_with_context_to_cut_do_not_hide_its_use(tmp_path: Path) -> None:
    """In windows of 33, a target in 33 has more than 32 tokens of context, and gains 0.05 nats."""
    reader = PlantedLosses(lambda t, p: 2 - (p >= 32) * 0.05 + t * 0)
    baseline = measure(tmp_path, random_documents(), reader, lengths=[32, 33]).truncated_context
    assert -0.002 < baseline.rows[-1].loss_gap < -0.001
    assert baseline.verdict.word == "yes"


@pytest.mark.parametrize("size", [1, 5, 40])
def test_a_sample_without_targets_to_cut_says_nothing(tmp_path: Path, size: int) -> None:
    """Of 40 targets in windows of 33 about one can be cut: the zeros of the others are no "no"."""
    reader = PlantedLosses(lambda t, p: 2 - (p >= 32) * 0.05 + t * 0)
    settings = {"lengths": [32, 33], "truncated_context_targets": size}
    baseline = measure(tmp_path, random_documents(), reader, **settings).truncated_context
    assert baseline.rows[-1].num_cut < 5
    assert baseline.verdict.word == "cannot tell"


def test_a_loss_whose_perplexity_no_float_holds_is_an_error(tmp_path: Path) -> None:
    scorer = PlantedLosses(lambda t, p: 800.0 + t * 0)
    with pytest.raises(CheckpointError, match="above 700 nats"):
        measure(tmp_path, random_documents(), scorer)


def test_a_result_of_other_weights_in_the_folder_is_kept(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "v", random_documents(6))
    config = PerplexityConfig(lengths=[32, 64], truncated_context_targets=None)
    for digest, loss in (("first", 2.0), ("second", 3.0)):
        step = fake_step(tmp_path, [prefix], 32, digest=digest)
        scorer = PlantedLosses(lambda t, p, loss=loss: loss + t * 0)
        run_and_store(Perplexity(), NativeModel(step), config, scorer)
    found = [json.loads(path.read_text())["rows"] for path in step.evals_folder.rglob("*.json")]
    assert sorted(round(own[0]["loss"]) for own in found) == [2, 3]
    assert len(list(step.evals_folder.rglob("*.png"))) == 2


def test_a_sample_is_seeded_and_uniform() -> None:
    documents = [np.arange(11), np.arange(101)]
    first, again, other = (draw(documents, 40, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.target, again.target)
    assert not np.array_equal(first.target, other.target)
    counts = np.zeros(2)
    for seed in range(200):
        sample = draw(documents, 11, seed)
        assert sample.target.min() >= 1
        assert (sample.target < np.array([11, 101])[sample.document]).all()
        counts += np.bincount(sample.document, minlength=2)
    assert counts[0] / counts.sum() == pytest.approx(10 / 110, abs=4 * math.sqrt(0.09 / 2200))
