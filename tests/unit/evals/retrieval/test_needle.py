"""Needle prompts property by property, and the grid on planted models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.config import NeedleConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer
from alibi_lm.evals.results import finished, run_and_store
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.evals.retrieval.needle_prompts import LARGEST_WALK, NUM_CANDIDATES, PromptMaker, says
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import generate
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import (
    EOS,
    CopyingScorer,
    PlantedLosses,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, tokenizer: WordTokenizer) -> Path:
    documents = [[*tokenizer.encode(code_text(seed, 400)), EOS] for seed in range(8)]
    return write_documents(tmp_path_factory.mktemp("needle") / "v", documents)


def count_of(part: np.ndarray, whole: np.ndarray) -> int:
    windows = np.lib.stride_tricks.sliding_window_view(whole, len(part))
    return int((windows == part).all(1).sum())


def maker_of(tokenizer: Any, *prefixes: Path, seed: int = 0) -> PromptMaker:
    return PromptMaker(tokenizer, [TokenFile(prefix) for prefix in prefixes], seed)


def test_200_prompts(tokenizer: WordTokenizer, prefix: Path) -> None:
    """Length exact, needle once, answer nowhere else, depth within one line."""
    maker = maker_of(tokenizer, prefix)
    generator = np.random.default_rng(0)
    lengths = [128, 200, 256, 511, 1024, 4096, 8192, 16384]
    for index in range(200):
        length, depth = lengths[index % len(lengths)], float(generator.random())
        trial = maker.trial(length, index)
        prompt, control = trial.prompt(depth), trial.control()
        assert (
            len(prompt) + maker.num_answer_tokens
            == length
            == len(control) + len(trial.answer.tokens)
        )
        assert count_of(trial.needle, prompt) == 1
        assert count_of(trial.needle, control) == 0
        text, without = tokenizer.decode(prompt.tolist()), tokenizer.decode(control.tolist())
        assert text.count(f"number of {trial.key} is {trial.answer.number}.\n") == 1
        assert text.count(trial.answer.number) == 1
        assert text.count(trial.key) == 2
        assert without.count(trial.key) == 1
        assert text.endswith(f"\n# The secret number of {trial.key} is")
        for candidate in trial.candidates:
            assert candidate.number not in without
            assert len(candidate.tokens) == maker.num_answer_tokens
        assert len({candidate.number for candidate in trial.candidates}) == NUM_CANDIDATES
        position, at_line_end = trial.place(depth)
        asked = round(depth * trial.haystack_budget)
        assert at_line_end
        line = tokenizer.decode(trial.haystack[position:asked].tolist())
        assert position <= asked
        assert "\n" not in line[1:-1]


def test_depths_0_and_1_lie_at_the_ends(tokenizer: WordTokenizer, prefix: Path) -> None:
    trial = maker_of(tokenizer, prefix).trial(1024, 0)
    assert trial.place(0.0) == (0, True)
    position, _ = trial.place(1.0)
    last_line = tokenizer.decode(trial.haystack[position : trial.haystack_budget].tolist())
    assert "\n" not in last_line[1:-1]


def test_trials_are_a_function_of_seed_length_and_index(
    tokenizer: WordTokenizer, prefix: Path
) -> None:
    first, again = maker_of(tokenizer, prefix), maker_of(tokenizer, prefix)
    again.trial(512, 3)
    assert np.array_equal(first.trial(512, 4).prompt(0.5), again.trial(512, 4).prompt(0.5))
    other = maker_of(tokenizer, prefix, seed=1).trial(512, 4)
    assert not np.array_equal(first.trial(512, 4).haystack[:50], other.haystack[:50])
    places = [first.trial(512, 4), first.trial(512, 5), first.trial(513, 4)]
    assert len({bytes(trial.haystack[:50].tobytes()) for trial in places}) == 3


def test_numbers_in_the_haystack_are_never_answers(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    maker = maker_of(tokenizer, write_documents(tmp_path / "v", [[EOS]]))
    numbers = [answer.number for answer in maker._answers]
    kept = numbers[:40]
    text = "\n".join(f"Alpha-{i} {number}123" for i, number in enumerate(numbers[40:], 1)) + "\n"
    document = tokenizer.encode(text) + [EOS]
    maker = maker_of(tokenizer, write_documents(tmp_path / "w", [document]))
    trial = maker.trial(len(document), 0)
    assert {candidate.number for candidate in trial.candidates} <= set(kept)
    assert not re.match(r"Alpha-[1-9]", trial.key)


def test_a_corpus_with_every_number_is_refused(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    maker = maker_of(tokenizer, write_documents(tmp_path / "v", [[EOS]]))
    text = "\n".join(answer.number for answer in maker._answers[5:])
    document = tokenizer.encode(text)
    maker = maker_of(tokenizer, write_documents(tmp_path / "w", [document]))
    with pytest.raises(DataError, match="all but 5 of"):
        maker.trial(len(document), 0)


def test_without_line_ends_the_needle_is_placed_exactly(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    document = tokenizer.encode(code_text(0, 2000).replace("\n", " "))
    trial = maker_of(tokenizer, write_documents(tmp_path / "v", [document])).trial(4096, 0)
    assert trial.place(0.5) == (round(0.5 * trial.haystack_budget), False)
    assert trial.place(0.0) == (0, True)
    assert trial.place(LARGEST_WALK / trial.haystack_budget) == (0, True)


def test_lengths_without_room_or_haystack_are_refused(
    tokenizer: WordTokenizer, prefix: Path
) -> None:
    maker = maker_of(tokenizer, prefix)
    shortest, most = maker.shortest_length(), int(TokenFile(prefix).num_tokens)
    maker.check([shortest, most])
    assert len(maker.trial(shortest, 0).prompt(0.3)) == shortest - maker.num_answer_tokens
    assert len(maker.trial(most, 0).prompt(0.3)) == most - maker.num_answer_tokens
    with pytest.raises(ConfigError) as error:
        maker.check([shortest - 1, 512, most + 1])
    assert [problem.value for problem in error.value.problems] == [shortest - 1, most + 1]


def test_a_tokenizer_without_digits_is_refused(prefix: Path) -> None:
    class NoDigits(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(re.sub("[0-9]", "", text))

    with pytest.raises(DataError, match="writes only 0 of"):
        maker_of(NoDigits(), prefix)


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 48213", True), (" 48213.", True), ("48213 is", True), (" 482134", False), (" 4821", False),
     ("is 48213", False), ("", False)],
)  # fmt: skip
def test_says(text: str, right: bool) -> None:
    assert says(text, "48213") is right


def grid(tmp_path: Path, tokenizer: Any, prefix: Path, scorer: Any, **settings: Any) -> Any:
    step = fake_step(tmp_path, [prefix], length=512)
    step.fake_tokenizer = tokenizer
    config = NeedleConfig(**{"lengths": [256, 512, 2048], "num_trials": 20, **settings})
    return run_and_store(Needle(), NativeModel(step), config, scorer)


def test_an_oracle_that_copies_is_right_in_every_cell(
    tmp_path: Path, tokenizer: WordTokenizer, prefix: Path
) -> None:
    # The last 8 tokens of a prompt (key included) single the needle out.
    result = grid(tmp_path, tokenizer, prefix, CopyingScorer(context=8))
    assert len(result.cells) == 15
    for cell in result.cells:
        assert (cell.ranking.rate, cell.generation.rate) == (1, 1)
        assert cell.trials == 20
    for row in result.by_length:
        assert row.control.generation.rate == 0
        assert row.control.ranking.rate <= 0.4
        assert row.trials == 100
    assert result.verdict.word == "holds"
    assert result.base.length == 256
    assert result.num_placed_exactly == 0
    assert result.needle.startswith(result.question)


def test_a_model_with_limited_context_fails_beyond_it(
    tmp_path: Path, tokenizer: WordTokenizer, prefix: Path
) -> None:
    depths = [0.0, 0.25, 0.5]
    result = grid(tmp_path, tokenizer, prefix, CopyingScorer(512, context=8), depths=depths)
    rates = {(c.length, c.depth): c.generation.rate for c in result.cells}
    assert all(rates[length, depth] == 1 for length in (256, 512) for depth in depths)
    assert all(rates[2048, depth] == 0 for depth in depths)
    assert result.verdict.word == "fails beyond"
    fades = grid(
        tmp_path, tokenizer, prefix, CopyingScorer(1100, context=8), lengths=[256, 512, 1024, 4096],
        depths=depths,
    )  # fmt: skip
    assert fades.verdict.word == "fades"
    assert "above chance at 1,024 but not at 4,096" in fades.verdict.text


@pytest.mark.parametrize("seed", range(3))
def test_a_blind_model_is_at_chance_and_said_not_to_retrieve(
    tmp_path: Path, tokenizer: WordTokenizer, prefix: Path, seed: int
) -> None:
    blind = PlantedLosses(lambda targets, positions: torch.ones(targets.shape))
    result = grid(tmp_path, tokenizer, prefix, blind, seed=seed, num_trials=30)
    correct = sum(row.ranking.correct for row in result.by_length)
    # 450 independent draws at 10%: a standard deviation of 1.4%.
    assert 0.04 < correct / 450 < 0.16
    assert result.verdict.word == "does not retrieve"
    assert "does not retrieve at all at any length" in result.verdict.text.lower()
    assert "says nothing about extrapolation" in result.verdict.text


def test_lengths_beyond_training_alone_tell_nothing(
    tmp_path: Path, tokenizer: WordTokenizer, prefix: Path
) -> None:
    scorer = CopyingScorer(context=8)
    result = grid(tmp_path, tokenizer, prefix, scorer, lengths=[2048], num_trials=3)
    assert result.verdict.word == "cannot tell"
    result = grid(tmp_path, tokenizer, prefix, scorer, lengths=[256], num_trials=5)
    assert "No longer prompt was tried" in result.verdict.text


def test_default_lengths_without_room_are_left_out_with_a_warning(
    tmp_path: Path,
    tokenizer: WordTokenizer,
    prefix: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = fake_step(tmp_path, [prefix], length=64)
    step.fake_tokenizer = tokenizer
    config = NeedleConfig(num_trials=1, depths=[0.5])
    result = run_and_store(Needle(), NativeModel(step), config, CopyingScorer(context=8))
    assert result.lengths == [64, 128, 256, 512, 1024]
    assert "needle.lengths = 32" in capsys.readouterr().err
    assert finished(Needle(), NativeModel(step), config) is not None
    assert (step.evals_folder / "needle.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_tokenizer_is_refused(tmp_path: Path, prefix: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        run_and_store(
            Needle(), NativeModel(fake_step(tmp_path, [prefix])), NeedleConfig(), CopyingScorer()
        )


def test_native_answers_equal_whole_passes_and_the_generator() -> None:
    """Shared keys give what one uncached pass a candidate gives, in any batch."""
    decoder = Decoder(ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=60), 1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(60, (3, 40), generator=generator)
    candidates = torch.randint(60, (3, 5, 4), generator=generator)
    scorer = NativeScorer(decoder)
    answers = scorer.loglikelihood_and_generate(prompts, candidates, 6)
    with torch.no_grad():
        for b in range(3):
            for k in range(5):
                whole = torch.cat([prompts[b], candidates[b, k]])[None]
                logs = decoder(whole)[0].double().log_softmax(-1)
                wanted = sum(logs[39 + i, candidates[b, k, i]] for i in range(4))
                assert answers.loglikelihoods[b, k].item() == pytest.approx(float(wanted), rel=1e-5)
    assert answers.generated.tolist() == generate(decoder, prompts, 6)
    exclusive_lock = scorer.loglikelihood_and_generate(prompts[1:2], candidates[1:2], 6)
    torch.testing.assert_close(exclusive_lock.loglikelihoods[0], answers.loglikelihoods[1])
    assert scorer.generate(prompts[1].tolist(), 6) == answers.generated[1].tolist()


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=60), 1)
    prompts = torch.randint(60, (2, 50), generator=torch.Generator().manual_seed(0))
    candidates = torch.randint(60, (2, 3, 1), generator=torch.Generator().manual_seed(1))
    whole = NativeScorer(decoder).loglikelihood_and_generate(prompts, candidates, 3)
    monkeypatch.setattr("alibi_lm.evals.models.scorer.PREFILL_TOKENS", 14)
    pieces = NativeScorer(decoder).loglikelihood_and_generate(prompts, candidates, 3)
    torch.testing.assert_close(whole.loglikelihoods, pieces.loglikelihoods)
    assert torch.equal(whole.generated, pieces.generated)
