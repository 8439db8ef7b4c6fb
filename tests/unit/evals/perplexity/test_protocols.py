"""Every perplexity protocol against a plain computation, target by target."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.evals.config import PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer
from alibi_lm.evals.perplexity.documents import tail_bytes, target_bytes
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.perplexity.protocols import target_losses, window_losses
from alibi_lm.evals.perplexity.truncated_context import cut_losses, draw
from alibi_lm.evals.perplexity.windows import (
    Window,
    fixed_target_windows,
    non_overlapping_windows,
    sliding_windows,
)
from alibi_lm.evals.results import run_and_store
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import ConfigError
from tests.unit.evals.evals_fakes import (
    EOS,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)

LENGTH, STRIDE, LAST = 16, 5, 6
SIZES = [2, LENGTH - 1, LENGTH, LENGTH + 1, LENGTH + 2, 3 * LENGTH + 1, 50]
"""Shorter than a window, exactly as long, one longer, and more."""
TOLERANCES = [(torch.float64, 1e-6), (torch.float32, 1e-5)]


def decoder(**settings: Any) -> Decoder:
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=50, initializer_range=0.2, **settings
    )
    return Decoder(config, seed=3).eval()


def documents() -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [np.append(generator.integers(2, 50, size - 1), EOS) for size in SIZES]


MODEL = decoder().double()


def plain(document: np.ndarray, start: int, target: int) -> float:
    """-log p(x[target] | x[start:target]) by one forward pass for this target alone."""
    with torch.no_grad():
        logits = MODEL(torch.from_numpy(document[start:target])[None])[0, -1]
    return -(logits[document[target]] - logits.exp().sum().log()).item()


# (document length, target) -> first token of the input; None: the target is not scored.
Rule = Callable[[int, int], int | None]


def tiled(size: int, target: int) -> int:
    return (target - 1) // LENGTH * LENGTH


def slid(size: int, target: int) -> int:
    """The first window that reaches the target."""
    start = 0
    while start + LENGTH < target:
        start += STRIDE
    return start


def fixed(size: int, target: int) -> int | None:
    return size - 1 - LENGTH if size - 1 >= LENGTH and target >= size - LAST else None


PROTOCOLS: dict[str, tuple[Callable[[list[np.ndarray]], list[Window]], Rule]] = {
    "non-overlapping": (lambda x: non_overlapping_windows(x, LENGTH), tiled),
    "sliding": (lambda x: sliding_windows(x, LENGTH, STRIDE), slid),
    "sliding, stride 1": (
        lambda x: sliding_windows(x, LENGTH, 1), lambda size, target: max(0, target - LENGTH),
    ),
    "fixed targets": (lambda x: fixed_target_windows(x, LENGTH, LAST), fixed),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[tuple[int, int], float]]:
    """Loss of each scored (document, target), each from its own forward pass in float64."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for name, (_, rule) in PROTOCOLS.items():
        found[name] = {}
        for index, document in enumerate(documents()):
            for target in range(1, len(document)):
                start = rule(len(document), target)
                if start is not None:
                    found[name][index, target] = plain(document, start, target)
    return found


@pytest.mark.parametrize("batch_tokens", [1, 70, 16384])
@pytest.mark.parametrize(("dtype", "close"), TOLERANCES)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_equals_a_plain_computation(
    name: str, dtype: torch.dtype, close: float, batch_tokens: int, expected: Any
) -> None:
    scorer = NativeScorer(decoder().to(dtype))
    windows = PROTOCOLS[name][0](documents())
    losses = {
        (window.document, window.first + i): loss
        for window, found in window_losses(scorer, documents(), windows, batch_tokens)
        for i, loss in enumerate(found)
    }
    right = expected[name]
    assert losses.keys() == right.keys()
    per_document: dict[int, list[tuple[float, float]]] = {}
    for key, loss in losses.items():
        per_document.setdefault(key[0], []).append((loss, right[key]))
    for pairs in per_document.values():
        ours, theirs = np.mean(pairs, axis=0)
        assert ours == pytest.approx(theirs, rel=close)


@pytest.mark.parametrize(("dtype", "close"), TOLERANCES)
def test_the_null_model_equals_a_plain_computation(dtype: torch.dtype, close: float) -> None:
    scorer = NativeScorer(decoder().to(dtype))
    sample = draw(documents(), 60, seed=1)
    assert len({*zip(sample.document, sample.target, strict=True)}) == 60
    for batch_tokens in (1, 90, 16384):
        found = cut_losses(scorer, documents(), sample, 7, [LENGTH], batch_tokens)
        beyond = 0
        for document, target, loss in zip(sample.document, sample.target, found, strict=True):
            if (target - 1) % LENGTH + 1 <= 7:
                assert math.isnan(loss)
                continue
            beyond += 1
            right = plain(documents()[document], target - 7, target)
            assert loss == pytest.approx(right, rel=10 * close)  # single losses, not their mean
        assert beyond > 20


def run(tmp_path: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """All protocols on the documents of more than 32 tokens."""
    some = [x.tolist() for x in documents()] + [[7, 3] * 20]
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", some)], LENGTH)
    defaults: dict[str, Any] = {"lengths": [LENGTH, 32], "stride": 5, "fixed_targets": 6,
                                "truncated_context_targets": 1000}  # fmt: skip
    return run_and_store(
        Perplexity(),
        NativeModel(step),
        PerplexityConfig(**defaults | settings),
        NativeScorer(decoder().to(dtype)),
    )


@pytest.mark.parametrize(("dtype", "close"), TOLERANCES)
def test_the_results_rows_are_those_computations(
    tmp_path: Path, dtype: torch.dtype, close: float
) -> None:
    result = run(tmp_path, dtype)
    scored = [x for x in [*documents(), np.array([7, 3] * 20)] if len(x) > 32]
    targets = [(x, target) for x in scored for target in range(1, len(x))]

    def mean(rule: Callable[[int, int], int], some: Any = targets) -> float:
        return float(np.mean([plain(x, rule(len(x), target), target) for x, target in some]))

    rows = {
        name: getattr(result, name).rows
        for name in ("sliding", "fixed_target", "truncated_context")
    }
    assert result.rows[0].loss == pytest.approx(mean(tiled), rel=close)
    assert rows["sliding"][0].loss == pytest.approx(mean(slid), rel=close)
    assert rows["sliding"][0].perplexity == pytest.approx(math.exp(mean(slid)), rel=10 * close)
    last = [(x, target) for x, target in targets if target >= len(x) - 6]
    for row in rows["fixed_target"]:
        start = row.length + 1
        right = mean(lambda size, target, start=start: size - start, last)  # type: ignore[misc]
        assert row.loss == pytest.approx(right, rel=close)
    assert result.fixed_target.num_tokens == len(last) == 18

    def cut(size: int, target: int) -> int:
        return max((target - 1) // 32 * 32, target - LENGTH)

    # 1000 is more than there are: the sample is every target.
    assert result.truncated_context.num_targets == len(targets) == result.num_tokens
    baseline = rows["truncated_context"][1]
    assert rows["truncated_context"][0].loss_gap == 0.0
    assert baseline.loss == pytest.approx(result.rows[1].loss, rel=1e-9)
    assert baseline.truncated_context_loss == pytest.approx(mean(cut), rel=close)
    assert baseline.loss_gap == pytest.approx(result.rows[1].loss - mean(cut), abs=10 * close)
    by_position = result.by_position
    assert [(row.first, row.last) for row in by_position.rows] == [
        (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 32)
    ]  # fmt: skip
    for row in by_position.rows:
        some = [(x, target) for x in scored for target in range(row.first, row.last + 1)]
        assert row.num_targets == len(some)
        assert row.loss == pytest.approx(mean(lambda size, target: 0, some), rel=close)
    for name in rows:
        assert getattr(result, name).protocol


def test_batch_size_changes_nothing(tmp_path: Path) -> None:
    results = [
        run(tmp_path / str(size), torch.float32, batch_tokens=size) for size in (1, 100, 16384)
    ]
    for name in (None, "sliding", "fixed_target", "truncated_context", "by_position"):
        first, *others = ((r if name is None else getattr(r, name)).rows for r in results)
        for other in others:
            for row, same in zip(first, other, strict=True):
                assert same.loss == pytest.approx(row.loss, rel=1e-6)


def test_what_is_not_asked_for_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path, stride=None, fixed_targets=None, truncated_context_targets=None)
    assert [getattr(result, name) for name in ("sliding", "fixed_target", "truncated_context")] == [
        None
    ] * 3
    beyond = run(tmp_path, truncated_context_length=32)
    assert beyond.truncated_context is None


def test_a_stride_beyond_the_shortest_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, stride=17, fixed_targets=20)
    assert [p.key for p in error.value.problems] == [
        "perplexity.stride", "perplexity.fixed_targets"
    ]  # fmt: skip


def test_bits_per_byte_of_each_protocol(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    texts = [code_text(seed, 12) for seed in range(6)]
    some = [[*tokenizer.encode(text), EOS] for text in texts]
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", some)], 16)
    step.fake_tokenizer = tokenizer
    ones = PlantedLosses(lambda t, p: torch.full(t.shape, math.log(2)))
    config = PerplexityConfig(lengths=[16, 32], stride=4, fixed_targets=8)
    result = run_and_store(Perplexity(), NativeModel(step), config, ones)
    scored = [x for x in some if len(x) > 32]
    whole = sum(len(tokenizer.decode(x[1:]).encode()) for x in scored)
    tail = sum(len(tokenizer.decode(x[-8:]).encode()) for x in scored)
    for name, size in (("sliding", whole), ("fixed_target", tail)):
        part = getattr(result, name)
        for row in part.rows:
            bits = part.num_tokens  # each loss is one bit
            assert row.bits_per_byte == pytest.approx(bits / size, rel=1e-6)
    arrays = [np.array(x) for x in scored]
    assert tail_bytes(arrays, tokenizer, 8).sum() == tail  # type: ignore[arg-type, union-attr]
    assert tail_bytes(arrays, None, 8) is None
    assert target_bytes(arrays, tokenizer).sum() == whole  # type: ignore[arg-type, union-attr]


def test_scaling_is_a_setting_of_the_eval(tmp_path: Path) -> None:
    from alibi_lm.evals.models.scorer import native_scorer

    class Step:
        config = fake_step(tmp_path, []).config

        def decoder(
            self, dtype: torch.dtype, model: ModelConfig | None = None, **_: Any
        ) -> Decoder:
            return Decoder(model or self.config.model, seed=1).to(dtype)

    step: Any = Step()
    tokens = torch.randint(0, 50, (1, 40))
    plain_scorer = native_scorer(step, "fp32")
    scaled = native_scorer(step, "fp32", scaling={"kind": "linear", "factor": 4})
    assert scaled.describe()["scaling"]["factor"] == 4
    assert plain_scorer.describe()["scaling"] is None
    assert not torch.equal(plain_scorer.token_losses(tokens), scaled.token_losses(tokens))
    with pytest.raises(ConfigError, match=r"scaling.kind = yarn: is not defined for position"):
        native_scorer(step, "fp32", scaling={"kind": "yarn", "factor": 4, "original_length": 16})


@pytest.mark.slow
def test_a_document_of_131072_tokens_goes_through_every_protocol(tmp_path: Path) -> None:
    """Scores of its square would be 64 GiB a head; the peak may rise by 2 GiB."""
    length = 131_072
    generator = np.random.default_rng(0)
    path = write_documents(tmp_path / "v", [generator.integers(2, 50, length).tolist()])
    step = fake_step(tmp_path, [path], 1024)
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result: Any = run_and_store(
        Perplexity(),
        NativeModel(step),
        PerplexityConfig(lengths=[1024, length - 1], stride=1024, fixed_targets=256),
        NativeScorer(Decoder(config)),
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2 * 2**20, f"{grown / 2**20:.2f} GiB"
    assert result.num_tokens == length - 1
    assert result.truncated_context.rows[1].num_cut > 1900
    assert result.sliding.rows[1].loss == pytest.approx(result.rows[1].loss)
    assert result.by_position.rows[-1].first == 65536


def test_every_target_has_its_loss() -> None:
    scorer = NativeScorer(decoder())
    windows = sliding_windows(documents(), LENGTH, STRIDE)
    assert all(
        np.isfinite(losses).all() for losses in target_losses(scorer, documents(), windows, 64)
    )
