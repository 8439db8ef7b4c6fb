"""Needle prompts at lengths from 256 to 131,072, property by property."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.config import NeedleConfig
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.results import run_and_store
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.evals.retrieval.needle_prompts import NUM_CANDIDATES, PromptMaker
from alibi_lm.evals.suite import read_suite
from alibi_lm.tasks.answer_pools import numbers_in
from alibi_lm.utils.errors import ConfigError
from tests.unit.evals.evals_fakes import (
    EOS,
    CopyingScorer,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)
from tests.unit.lines_run import lines_run

LENGTHS = [256 * 2**k for k in range(10)]


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: WordTokenizer) -> TokenFile:
    documents = [[*tokenizer.encode(code_text(seed, 2500)), EOS] for seed in range(8)]
    folder = tmp_path_factory.mktemp("needles")
    file = TokenFile(write_documents(folder / "v", documents))
    assert file.num_tokens > max(LENGTHS)
    return file


def count_of(part: np.ndarray, whole: np.ndarray) -> int:
    """Occurrences of a run of tokens."""
    starts = np.flatnonzero(whole == part[0])
    starts = starts[starts <= len(whole) - len(part)]
    return sum(bool((whole[s : s + len(part)] == part).all()) for s in starts.tolist())


def check(maker: PromptMaker, tokenizer: WordTokenizer, length: int, index: int) -> None:
    """Length exact, needle once, answer nowhere else, depth within one line of the asked one."""
    depth = float(np.random.default_rng(index).random())
    trial = maker.trial(length, index)
    prompt, control = trial.prompt(depth), trial.control()
    assert len(prompt) + maker.num_answer_tokens == length
    assert len(control) == len(prompt)
    assert count_of(trial.needle, prompt) == 1
    assert count_of(trial.needle, control) == 0
    text, without = tokenizer.decode(prompt.tolist()), tokenizer.decode(control.tolist())
    number = trial.answer.number
    assert list(numbers_in(text, 5)).count(number) == text.count(number) == 1
    assert number not in without
    assert text.count(trial.key) == 2
    assert text.endswith(f"\n# The secret number of {trial.key} is")
    position, at_line_end = trial.place(depth)
    asked = round(depth * trial.haystack_budget)
    assert at_line_end
    assert position <= asked
    skipped = tokenizer.decode(trial.haystack[position:asked].tolist())
    assert "\n" not in skipped[1:-1]
    after = tokenizer.decode(prompt[-trial.distance(depth) :].tolist())
    assert after.startswith(f"\n# The secret number of {trial.key} is {number}.\n")


@pytest.mark.parametrize("num_distractors", [0, 3])
def test_100_prompts(tokenizer: WordTokenizer, corpus: TokenFile, num_distractors: int) -> None:
    maker = PromptMaker(tokenizer, [corpus], 0, num_distractors)  # type: ignore[arg-type]
    lengths = [length for length in LENGTHS if length <= 16384]
    for index in range(100):
        check(maker, tokenizer, lengths[index % len(lengths)], index)
    check(maker, tokenizer, 131072, 0)


@pytest.mark.slow
def test_1000_prompts(tokenizer: WordTokenizer, corpus: TokenFile) -> None:
    maker = PromptMaker(tokenizer, [corpus], 1)  # type: ignore[arg-type]
    for index in range(1000):
        check(maker, tokenizer, LENGTHS[index % len(LENGTHS)], index)


def test_distractors_are_lines_of_other_keys_in_every_prompt(
    tokenizer: WordTokenizer, corpus: TokenFile
) -> None:
    maker = PromptMaker(tokenizer, [corpus], 0, 5)  # type: ignore[arg-type]
    shortest = maker.shortest_length()
    assert shortest > PromptMaker(tokenizer, [corpus], 0).shortest_length()  # type: ignore[arg-type]
    places = set()
    for index in range(60):
        length = (shortest, 512, 2000)[index % 3]
        trial = maker.trial(length, index)
        assert len({key for key, _ in trial.distractors} | {trial.key}) == 6
        numbers = {number for _, number in trial.distractors}
        assert len(numbers | {trial.answer.number}) == 6
        assert numbers <= {candidate.number for candidate in trial.candidates}
        assert len({candidate.number for candidate in trial.candidates}) == NUM_CANDIDATES
        for tokens in (trial.prompt(0.0), trial.prompt(0.4), trial.prompt(1.0), trial.control()):
            assert len(tokens) == length - maker.num_answer_tokens
            text = tokenizer.decode(tokens.tolist())
            for key, number in trial.distractors:
                assert text.count(f"\n# The secret number of {key} is {number}.\n") == 1
                assert text.count(number) == 1
            places.add(text.index(f"of {trial.distractors[0][0]} is") * 10 // len(text))
    assert len(places) >= 8
    with pytest.raises(ConfigError, match="needle.num_distractors = 101"):
        read_suite(None, ["needle.num_distractors=101"])


@pytest.mark.parametrize("num_distractors", [0, 4])
def test_making_a_prompt_takes_steps_linear_in_its_length(
    tokenizer: WordTokenizer, corpus: TokenFile, num_distractors: int
) -> None:
    maker = PromptMaker(tokenizer, [corpus], 0, num_distractors)  # type: ignore[arg-type]
    maker.trial(131072, 0)  # the texts of all tokens are known from here on

    def making(length: int) -> Callable[[], object]:
        return lambda: maker.trial(length, 0).prompt(0.5)

    steps = [lines_run(making(length)) for length in (2048, 8192, 32768)]
    assert steps[1] <= 4.4 * steps[0] + 2000
    assert steps[2] <= 4.4 * steps[1] + 2000


def test_scores_by_distance_add_up_and_show_a_context_limit(
    tmp_path: Path, tokenizer: WordTokenizer, corpus: TokenFile
) -> None:
    step = fake_step(tmp_path, [Path(corpus.prefix)], length=512)
    step.fake_tokenizer = tokenizer
    config = NeedleConfig(lengths=[256, 512, 2048], num_trials=6, num_distractors=2)
    result = run_and_store(Needle(), NativeModel(step), config, CopyingScorer(512, context=8))
    assert result.num_distractors == 2
    rows = result.by_distance
    assert sum(row.trials for row in rows) == sum(cell.trials for cell in result.cells)
    assert {row.up_to for row in rows} >= {64, 512, 2048}
    for row in rows:
        rate = row.generation.rate
        # The copy's source, not the needle's start, must be within the limit: a line more is seen.
        assert rate == (row.up_to <= 512) or (row.above == 512 and rate < 0.2), row
    assert (step.evals_folder / "needle_distance.png").read_bytes()[:4] == b"\x89PNG"
