"""Perplexity against plain computations, and its verdicts on planted models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.evals.base import default_lengths
from alibi_lm.evals.config import NeedleConfig, PerplexityConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer
from alibi_lm.evals.perplexity.documents import target_bytes
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.results import finished, run_and_store, shown
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.evals.suite import read_suite
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError
from tests.unit.evals.evals_fakes import (
    EOS,
    VOCAB_SIZE,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)


def decoder(vocab_size: int = 50, **settings: Any) -> Decoder:
    settings = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, **settings}
    model = Decoder(ModelConfig(vocab_size=vocab_size, **settings), seed=3)
    with torch.no_grad():  # initial weights are so small that every loss would be the same
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def random_documents(sizes: list[int], vocab_size: int = 50) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(2, vocab_size, size - 1).tolist() + [EOS] for size in sizes]


def plain_loss(model: Decoder, documents: list[list[int]], length: int) -> tuple[float, int]:
    """The mean loss by one window at a time, in float64, written without the code under test."""
    total, count = 0.0, 0
    model = model.double()
    for document in documents:
        position = 1
        while position < len(document):
            inputs = document[position - 1 : position - 1 + length]
            targets = document[position : position + length]
            with torch.no_grad():
                logits = model(torch.tensor([inputs]))[0]
            for row, target in enumerate(targets):
                log_probability = logits[row, target] - torch.logsumexp(logits[row], 0)
                total -= log_probability.item()
                count += 1
            position += length
    return total / count, count


@pytest.mark.parametrize("batch_tokens", [1, 70, 16384])
def test_perplexity_equals_a_plain_computation(tmp_path: Path, batch_tokens: int) -> None:
    """Documents as long as the longest window, one and more longer; shorter ones are left out."""
    sizes = [32, 33, 34, 65, 64, 97, 20]
    documents = random_documents(sizes)
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], length=16)
    step.fake_decoder = decoder()
    config = PerplexityConfig(lengths=[8, 16, 32], batch_tokens=batch_tokens)
    result = run_and_store(Perplexity(), NativeModel(step), config)
    scored = [document for document in documents if len(document) > 32]
    assert result.num_documents == len(scored) == 5
    for row in result.rows:
        loss, count = plain_loss(decoder(), scored, row.length)
        assert row.loss == pytest.approx(loss, rel=1e-5)
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert count == result.num_tokens


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", random_documents([70, 80]))], 16)
    losses = []
    for precision in ("fp32", "bf16"):
        step.fake_decoder = decoder()
        suite = read_suite(None, [f"perplexity.precision={precision}", "perplexity.lengths=[16]"])
        result = run_and_store(Perplexity(), NativeModel(step), suite.perplexity)
        losses.append(result.rows[0].loss)
        assert result.model["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=3e-2)


def test_a_uniform_model_has_the_vocabulary_as_perplexity(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    texts = [code_text(seed, 40) for seed in range(6)]
    documents = [[*tokenizer.encode(text), EOS] for text in texts]
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 32)
    step.fake_tokenizer = tokenizer
    uniform = PlantedLosses(lambda t, p: torch.full(t.shape, math.log(VOCAB_SIZE)))
    result = run_and_store(
        Perplexity(), NativeModel(step), PerplexityConfig(lengths=[16, 32, 64]), uniform
    )
    num_bytes = sum(len(t.encode()) - len(tokenizer.decode(d[:1]))
                    for t, d in zip(texts, documents, strict=True))  # fmt: skip
    assert result.num_bytes == num_bytes
    for row in result.rows:
        assert row.perplexity == pytest.approx(VOCAB_SIZE, rel=1e-5)
        bits = 12 * result.num_tokens / num_bytes
        assert row.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert result.verdict.word == "holds"


def test_a_bigram_model_scores_the_same_at_every_length(tmp_path: Path) -> None:
    """One token of context is all it uses, and every target has one: windows change nothing."""
    documents = random_documents([130, 200, 300])
    table = torch.rand(50, generator=torch.Generator().manual_seed(0)).double() + 1

    def rule(targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table[targets]

    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 32)
    result = run_and_store(
        Perplexity(), NativeModel(step), PerplexityConfig(lengths=[1, 32, 128]), PlantedLosses(rule)
    )
    wanted = np.mean([table[token].item() for document in documents for token in document[1:]])
    for row in result.rows:
        assert row.loss == pytest.approx(wanted, rel=1e-6)
        assert row.ratio == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        (lambda t, p: 1 + (p >= 32) * 2.0 + t * 1e-4, "rises"),
        (lambda t, p: 2 - p.clamp(max=31) / 32 + t * 1e-4, "falls"),
        (lambda t, p: 2 + t * 1e-4, "holds"),
    ],
    ids=["breaks past L", "early tokens are hard", "blind to length"],
)
def test_verdicts_on_planted_models(tmp_path: Path, rule: Any, word: str) -> None:
    documents = random_documents([300 + 7 * i for i in range(12)])
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 32)
    result = run_and_store(
        Perplexity(),
        NativeModel(step),
        PerplexityConfig(lengths=[16, 32, 256]),
        PlantedLosses(rule),
    )
    assert result.verdict.word == word
    assert "does not show" in result.verdict.caveat


def test_verdict_cannot_tell_without_the_training_length_or_from_one_document(
    tmp_path: Path,
) -> None:
    planted = PlantedLosses(lambda t, p: torch.ones(t.shape))
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", random_documents([300]))], 32)
    for lengths in ([64, 128], [16, 32], [32, 128]):
        result = run_and_store(
            Perplexity(), NativeModel(step), PerplexityConfig(lengths=lengths), planted
        )
        assert result.verdict.word == "cannot tell"
    assert result.rows[0].perplexity_interval is None
    assert (tmp_path / "run/evals/step_00000007/perplexity.png").read_bytes()[:4] == b"\x89PNG"


def test_result_names_protocol_corpus_run_step_versions(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "v", random_documents([300, 310]))
    step = fake_step(tmp_path, [prefix], 32)
    planted = PlantedLosses(lambda t, p: torch.ones(t.shape))
    config = PerplexityConfig(lengths=[32, 64])
    assert finished(Perplexity(), NativeModel(step), config) is None
    result = run_and_store(Perplexity(), NativeModel(step), config, planted)
    text = (step.evals_folder / "perplexity.json").read_text()
    done = finished(Perplexity(), NativeModel(step), config)
    assert done is not None
    assert result == shown(Perplexity(), NativeModel(step)) == done.result
    assert json.loads(text) == result.to_json()
    assert result.lengths == result.stride == [32, 64]
    assert result.corpus[0].prefix == str(prefix)
    assert result.corpus[0].num_long_documents == 2
    assert (result.run, result.step) == (str(tmp_path / "run"), 7)
    assert set(result.versions) == {"alibi_lm", "torch"}
    assert "x[s+1:s+L+1]" in result.protocol


def test_finished_asks_for_the_same_settings_corpus_and_step(tmp_path: Path) -> None:
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", random_documents([300, 310]))], 32)
    config = PerplexityConfig(lengths=[32, 64])
    run_and_store(
        Perplexity(), NativeModel(step), config, PlantedLosses(lambda t, p: torch.ones(t.shape))
    )
    assert finished(Perplexity(), NativeModel(step), config)
    assert finished(Perplexity(), NativeModel(step), PerplexityConfig(lengths=[32])) is None
    assert finished(Needle(), NativeModel(step), NeedleConfig()) is None
    step.digest = "another"
    assert finished(Perplexity(), NativeModel(step), config) is None
    assert shown(Perplexity(), NativeModel(step)) is None
    step.digest = "d1"
    write_documents(tmp_path / "v", random_documents([300, 311]))
    assert finished(Perplexity(), NativeModel(step), config) is None
    (step.evals_folder / "perplexity.json").write_text('{"eval": "perp')
    assert shown(Perplexity(), NativeModel(step)) is None


def test_max_tokens_takes_whole_documents(tmp_path: Path) -> None:
    documents = random_documents([101] * 20)
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", documents)], 32)
    planted = PlantedLosses(lambda t, p: torch.ones(t.shape))
    result = run_and_store(
        Perplexity(), NativeModel(step), PerplexityConfig(lengths=[32], max_tokens=250), planted
    )
    assert (result.num_documents, result.num_tokens) == (3, 300)
    assert result.corpus[0].num_long_documents == 20


def test_no_document_long_enough_is_refused_by_name(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "v", random_documents([64, 65, 512]))
    step = fake_step(tmp_path, [prefix], 32)
    with pytest.raises(DataError, match=r"more than 512 tokens.*longest document has 512") as error:
        run_and_store(Perplexity(), NativeModel(step), PerplexityConfig(), PlantedLosses(None))
    assert str(prefix) in str(error.value)
    assert not step.evals_folder.exists()


def test_empty_corpora_and_none_are_refused(tmp_path: Path) -> None:
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", [])], 32)
    with pytest.raises(DataError, match="longest document has 0"):
        run_and_store(Perplexity(), NativeModel(step), PerplexityConfig(), PlantedLosses(None))
    with pytest.raises(DataError, match="names no validation corpus"):
        run_and_store(
            Perplexity(),
            NativeModel(fake_step(tmp_path, [], 32)),
            PerplexityConfig(),
            PlantedLosses(None),
        )


def test_losses_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    step = fake_step(tmp_path, [write_documents(tmp_path / "v", random_documents([99]))], 32)
    planted = PlantedLosses(lambda t, p: torch.full(t.shape, math.nan))
    with pytest.raises(CheckpointError, match="not finite"):
        run_and_store(Perplexity(), NativeModel(step), PerplexityConfig(lengths=[32]), planted)
    assert not (step.evals_folder / "perplexity.json").exists()


def test_foreign_tokens_and_too_few_positions_are_refused() -> None:
    scorer = NativeScorer(decoder(position="learned", max_positions=16))
    assert scorer.token_losses(torch.zeros(1, 17, dtype=torch.int64)).shape == (1, 16)
    with pytest.raises(ConfigError, match="never cut"):
        scorer.token_losses(torch.zeros(1, 18, dtype=torch.int64))
    with pytest.raises(DataError, match="outside 0 to 49"):
        scorer.token_losses(torch.full((1, 5), 50))


def test_bytes_count_utf8_of_the_targets() -> None:
    tokenizer = WordTokenizer()
    document = np.array([*tokenizer.encode("é é\n"), EOS])
    assert target_bytes([document], tokenizer) == [len(" é\n".encode())]  # type: ignore[arg-type]
    assert target_bytes([document], None) is None


def test_default_lengths_and_the_suites_rules() -> None:
    assert default_lengths(256) == [128, 256, 512, 1024, 2048, 4096]
    assert default_lengths(1) == [1, 2, 4, 8, 16]
    with pytest.raises(ConfigError) as error:
        read_suite(None, ["perplexity.lengths=[0, 8, 8]", "needle.depths=[2]", "needle.seed=-1",
                          "perplexity.batch_tokens=0", "needle.num_trials=0"])  # fmt: skip
    assert len(error.value.problems) == 6
