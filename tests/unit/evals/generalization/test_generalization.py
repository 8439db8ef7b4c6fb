"""Longer problems put to models whose answers are known: the numbers and the words are right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alibi_lm.config_loading import build
from alibi_lm.evals.config import GeneralizationConfig
from alibi_lm.evals.generalization.evaluation import (
    DEFAULT_LENGTHS,
    Generalization,
    make_trials,
)
from alibi_lm.evals.generalization.result import table
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer, PromptScores
from alibi_lm.evals.results import evaluate, run_and_store
from alibi_lm.evals.suite import suite_class
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.tasks.reasoning import END
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.evals.evals_fakes import WordTokenizer, fake_step


class Solver:
    """Solves problems of up to `most_items` items; beyond it, all but the first token is right."""

    vocab_size = 4096
    dp_size = 1

    dp_size = 1

    def __init__(self, tokenizer: WordTokenizer, most_items: int) -> None:
        self._tokenizer = tokenizer
        self._most_items = most_items

    def _solution(self, prompt: str) -> tuple[str, int]:
        task, _, rest = prompt.removesuffix("=").partition(":")
        if task == "add":
            a, b = (int(term[::-1]) for term in rest.strip().split("+"))
            return str(a + b)[::-1], len(rest.strip().split("+")[0])
        items = rest.split()
        return " " + " ".join(sorted(items) if task == "sort" else items), len(items)

    def _ids(self, prompt: str) -> tuple[list[int], bool]:
        answer, items = self._solution(prompt)
        return self._tokenizer.encode(answer + END + "then"), items <= self._most_items

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        rows = []
        for prompt in prompts.tolist():
            ids, known = self._ids(self._tokenizer.decode(prompt))
            if not known:
                ids[0] = self._tokenizer.encode("wrong")[0]
            rows.append((ids + [0] * max_new_tokens)[:max_new_tokens])
        return PromptScores(torch.zeros(candidates.shape[:2]), torch.tensor(rows))

    def token_losses(self, tokens: Tensor) -> Tensor:
        """log 4/3 where the token is the right one (p = 3/4), log 4 where it is not known."""
        losses = torch.full((tokens.shape[0], tokens.shape[1] - 1), 9.0)
        for row, ids in enumerate(tokens.tolist()):
            text = self._tokenizer.decode(ids)
            prompt = text[: text.index("=") + 1]
            size = len(self._tokenizer.encode(prompt))
            losses[row, size - 1 :] = math.log(4 / 3)
            if not self._ids(prompt)[1]:
                losses[row, size - 1] = math.log(4)
        return losses

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {"kind": "planted"}


class Blind(Solver):
    """Says the same whatever is asked."""

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        ids = self._tokenizer.encode(" a b c" + END) + [0] * max_new_tokens
        rows = [ids[:max_new_tokens]] * len(prompts)
        return PromptScores(torch.zeros(candidates.shape[:2]), torch.tensor(rows))

    def token_losses(self, tokens: Tensor) -> Tensor:
        return torch.full((tokens.shape[0], tokens.shape[1] - 1), math.log(4096))


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


def subject_of(folder: Path, tokenizer: Any) -> NativeModel:
    return NativeModel(fake_step(folder, [], fake_tokenizer=tokenizer))


CONFIG = GeneralizationConfig(num_trials=10, batch_tokens=300)


@pytest.mark.parametrize(
    ("most_items", "word", "text"),
    [
        (40, "generalizes", "Copy generalizes from 20 to 40 items, the most asked (100%"),
        (20, "stops", "Sort stops at 20 items, the most trained (0% (0% to 28%) exact at 25)."),
        (30, "partly", "Addition generalizes from 20 to 30 items and stops there (0%"),
        (
            10,
            "not learned",
            "Copy is not learned up to 20 items, the most trained by",
        ),
    ],
)
def test_a_model_that_solves_up_to_some_items_is_said_to(
    tmp_path: Path, tokenizer: WordTokenizer, most_items: int, word: str, text: str
) -> None:
    eval_model = subject_of(tmp_path, tokenizer)
    result = run_and_store(Generalization(), eval_model, CONFIG, Solver(tokenizer, most_items))
    assert result.verdict.word == word
    assert text in result.verdict.text
    assert result.lengths == list(DEFAULT_LENGTHS)
    assert len(result.cells) == 3 * 8
    for cell in result.cells:
        assert cell.trials == 10
        assert cell.rate == (cell.items <= most_items)
        assert cell.interval[0] <= cell.rate <= cell.interval[1]
        if cell.items <= most_items:
            assert cell.teacher_forced == 1
            assert cell.loss == pytest.approx(math.log(4 / 3), rel=1e-5)
        elif cell.task != "addition":  # whose answers may have a digit more
            tokens = cell.items
            assert cell.teacher_forced == pytest.approx((tokens - 1) / tokens)
    assert all(own.longest_solved == most_items for own in result.verdict.tasks.values())
    stored = json.loads((eval_model.evals_folder / "generalization.json").read_text())
    assert stored == result.to_json()
    assert (eval_model.evals_folder / "generalization.png").stat().st_size > 10_000
    assert len(table(result)) == 1 + 2 * 3


def test_a_blind_model_has_learned_nothing(tmp_path: Path, tokenizer: WordTokenizer) -> None:
    result = run_and_store(
        Generalization(), subject_of(tmp_path, tokenizer), CONFIG, Blind(tokenizer, 0)
    )
    assert result.verdict.word == "not learned"
    assert all(cell.rate == cell.teacher_forced == 0 for cell in result.cells)


def test_an_answer_that_goes_on_is_wrong(tmp_path: Path, tokenizer: WordTokenizer) -> None:
    class Rambling(Solver):
        def _ids(self, prompt: str) -> tuple[list[int], bool]:
            return self._tokenizer.encode(self._solution(prompt)[0] + " a" + END), True

    result = run_and_store(
        Generalization(), subject_of(tmp_path, tokenizer), CONFIG, Rambling(tokenizer, 0)
    )
    assert all(cell.rate == 0 for cell in result.cells)


def test_without_lengths_on_both_sides_it_cannot_tell(
    tmp_path: Path, tokenizer: WordTokenizer
) -> None:
    config = GeneralizationConfig(num_trials=2, lengths=[5, 20])
    result = run_and_store(
        Generalization(), subject_of(tmp_path, tokenizer), config, Solver(tokenizer, 40)
    )
    assert result.verdict.word == "cannot tell"
    assert "no length beyond 20" in result.verdict.text


def test_the_models_own_answers_are_those_of_plain_greedy_decoding(
    tmp_path: Path, tokenizer: WordTokenizer
) -> None:
    """A random decoder, batched and one by one: the same counts as our own loop over logits."""
    config = GeneralizationConfig(num_trials=6, lengths=[1, 2, 25], tasks=["copy", "addition"])
    decoder = Decoder(ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=4096))
    scorer = NativeScorer(decoder)
    result = run_and_store(Generalization(), subject_of(tmp_path, tokenizer), config, scorer)
    index = 0
    for task in config.tasks:
        for items in (1, 2, 25):
            loss, likely, tokens = 0.0, 0, 0
            for trial in make_trials(tokenizer, task, items, config):  # type: ignore[arg-type]
                ids = torch.tensor([[*trial.prompt, *trial.answer]])
                with torch.no_grad():
                    logits = decoder(ids[:, :-1])[0, -len(trial.answer) :].double()
                own = logits.log_softmax(-1).gather(1, ids[0, -len(trial.answer) :, None])
                loss -= float(own.sum())
                likely += int((own > math.log(0.5)).sum())
                tokens += len(trial.answer)
            cell = result.cells[index]
            assert cell.loss == pytest.approx(loss / tokens, rel=1e-5)
            assert cell.teacher_forced == likely / tokens
            index += 1


def test_problems_are_a_function_of_the_seed(tokenizer: WordTokenizer) -> None:
    first = make_trials(tokenizer, "sort", 7, CONFIG)  # type: ignore[arg-type]
    assert first == make_trials(tokenizer, "sort", 7, CONFIG)  # type: ignore[arg-type]
    other = GeneralizationConfig(num_trials=10, seed=1)
    assert first != make_trials(tokenizer, "sort", 7, other)  # type: ignore[arg-type]
    assert len({trial.question.prompt for trial in first}) == 10
    assert np.unique([len(trial.prompt) for trial in first]).size == 1


def test_lengths_without_positions_are_refused_or_left_out(
    tmp_path: Path, tokenizer: WordTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_model = subject_of(tmp_path, tokenizer)
    eval_model.checkpoint.config.model.max_positions = 60
    config = GeneralizationConfig(num_trials=2, tasks=["copy"])
    result = run_and_store(Generalization(), eval_model, config, Solver(tokenizer, 40))
    assert result.lengths == [5, 10, 15, 20, 25]
    assert "left out by default" in capsys.readouterr().err
    asked = GeneralizationConfig(num_trials=2, tasks=["copy"], lengths=[5, 40])
    with pytest.raises(ConfigError, match=r"lengths = 40: takes 85 tokens"):
        run_and_store(Generalization(), eval_model, asked, Solver(tokenizer, 40))
    with pytest.raises(DataError, match="has no tokenizer"):
        run_and_store(Generalization(), subject_of(tmp_path, None), config)


def test_it_is_run_once(
    tmp_path: Path, tokenizer: WordTokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    eval_model = subject_of(tmp_path, tokenizer)
    monkeypatch.setattr(NativeModel, "scorer", lambda self, *a, **k: Solver(tokenizer, 20))
    first = evaluate(Generalization(), eval_model, CONFIG)
    assert "stops at 20 items" in capsys.readouterr().out
    assert evaluate(Generalization(), eval_model, CONFIG).seconds == first.seconds
    assert "done before" in capsys.readouterr().out


def test_settings_are_checked() -> None:
    for wrong, message in [
        ({"lengths": []}, r"lengths = \[\]: is empty"),
        ({"lengths": [5, 5]}, "twice"),
        ({"tasks": []}, "at least one"),
        ({"tasks": ["copy", "copy"]}, "names copy twice"),
        ({"threshold": 0}, "threshold"),
        ({"num_trials": 0}, "num_trials"),
        ({"seed": -1}, "seed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(suite_class(), {"generalization": wrong})
