"""Interrupted evals resume with the next part and end with the numbers of uninterrupted ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alibi_lm.evals.base import Eval
from alibi_lm.evals.config import (
    GeneralizationConfig,
    NeedleConfig,
    PerplexityConfig,
    RetrievalConfig,
)
from alibi_lm.evals.generalization.evaluation import Generalization
from alibi_lm.evals.models.base import NativeModel
from alibi_lm.evals.models.scorer import NativeScorer, PromptScores
from alibi_lm.evals.parts import Parts
from alibi_lm.evals.perplexity.evaluation import Perplexity
from alibi_lm.evals.results import evaluate, run_and_store
from alibi_lm.evals.retrieval.evaluation import Retrieval
from alibi_lm.evals.retrieval.needle import Needle
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils import progress
from alibi_lm.utils.errors import UserInterrupt
from alibi_lm.utils.progress import Progress
from tests.unit.evals.evals_fakes import (
    EOS,
    VOCAB_SIZE,
    CopyingScorer,
    WordTokenizer,
    code_text,
    fake_step,
    write_documents,
)
from tests.unit.evals.retrieval.solving_scorer import SolvingScorer

EVALS: list[tuple[Eval[Any, Any], Any, int]] = [
    (
        Perplexity(),
        PerplexityConfig(
            lengths=[32, 64, 128],
            stride=16,
            fixed_targets=8,
            truncated_context_targets=100,
            batch_tokens=2048,
        ),
        10,
    ),
    (Needle(), NeedleConfig(lengths=[128, 256, 512], num_trials=4, batch_tokens=1024), 3),
    (
        Retrieval(),
        RetrievalConfig(
            tasks=["passkey", "mqar", "niah_multivalue"],
            lengths=[512, 1024],
            num_trials=3,
            batch_tokens=2048,
        ),
        6,
    ),
    (Generalization(), GeneralizationConfig(lengths=[3, 5], num_trials=4), 6),
]
NAMES = [each.name for each, _, _ in EVALS]


class Stopping:
    """A scorer that is interrupted at its call number `stop`."""

    def __init__(self, scorer: Any, stop: int | None = None) -> None:
        self.calls = 0
        self._scorer, self._stop = scorer, stop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._scorer, name)
        return (
            self._counted(value)
            if name in ("token_losses", "loglikelihood_and_generate")
            else value
        )

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self._stop:
                raise KeyboardInterrupt
            return call(*arguments)

        return counted


class SolvingByPrompt(SolvingScorer):
    """Its chance depends on the prompts alone, not on what was asked before."""

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        self._random = np.random.default_rng(int(prompts.sum()))
        return super().loglikelihood_and_generate(prompts, candidates, max_new_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory, tokenizer: WordTokenizer) -> Path:
    documents = [[*tokenizer.encode(code_text(seed, 60)), EOS] for seed in range(6)]
    return write_documents(tmp_path_factory.mktemp("parts") / "v", documents)


def model_of(folder: Path, prefix: Path, tokenizer: Any) -> NativeModel:
    return NativeModel(fake_step(folder, [prefix], length=64, fake_tokenizer=tokenizer))


def scorer_of(name: str, tokenizer: Any) -> Any:
    if name == "needle":
        return CopyingScorer(200)
    if name == "retrieval":
        return SolvingByPrompt(tokenizer, 400)
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 2}
    decoder = Decoder(ModelConfig(vocab_size=VOCAB_SIZE, **shape), seed=3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8)
    return NativeScorer(decoder.eval())


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        timed = ("seconds", "tokens_per_second")
        return {k: without_seconds(item) for k, item in value.items() if k not in timed}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("each", "config", "total"), EVALS, ids=NAMES)
def test_an_interrupted_eval_resumes_and_gives_the_same_result(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], each: Any, config: Any, total: int,
) -> None:  # fmt: skip
    """Interrupted three times; every call but the interrupted ones' parts is made once."""
    if each.name == "retrieval":
        config.sizes.passkey_num_distances = 2

    def run(folder: str, stop: int | None) -> tuple[Any, int]:
        scorer = Stopping(scorer_of(each.name, tokenizer), stop)
        monkeypatch.setattr(NativeModel, "scorer", lambda *_, **__: scorer)
        model = model_of(tmp_path / folder, prefix, tokenizer)
        return evaluate(each, model, config), scorer.calls

    whole, calls = run("whole", None)
    partial = tmp_path / "again/run/evals/step_00000007" / f"{each.name}.partial.json"
    with pytest.raises(UserInterrupt, match=r"^interrupted: no part was finished, nothing is kept"):
        run("again", 1)
    finished: list[int] = []
    for _ in range(2):
        with pytest.raises(UserInterrupt) as caught:
            run("again", max(2, calls // 3))
        finished.append(len(json.loads(partial.read_text())["parts"]))
        assert str(caught.value) == (
            f"interrupted: {each.name} keeps {finished[-1]} of {total} parts in {partial}; "
            "run the same command to resume"
        )
    assert 0 < finished[0] < finished[1] < total
    capsys.readouterr()
    resumed, rest = run("again", None)
    assert f"resuming with {finished[1]} of {total} parts" in capsys.readouterr().out
    assert rest < calls
    (expected, got) = (without_seconds(result.to_json()) for result in (whole, resumed))
    for side in (expected, got):
        side.pop("run")
    assert json.dumps(got) == json.dumps(expected)
    assert not partial.exists()


def test_parts_of_other_inputs_are_not_used(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path, prefix, tokenizer)
    configs = [NeedleConfig(lengths=[128, 256], num_trials=2, seed=seed) for seed in (0, 1)]
    calls = []
    for config, stop in ((configs[0], 2), (configs[1], None)):
        scorer = Stopping(CopyingScorer(), stop)
        monkeypatch.setattr(NativeModel, "scorer", lambda *_, scorer=scorer, **__: scorer)
        if stop is None:
            evaluate(Needle(), model, config)
        else:
            with pytest.raises(KeyboardInterrupt):
                evaluate(Needle(), model, config)
            assert Needle().parts_path(model).exists()
        calls.append(scorer.calls)
    assert calls == [2, 2]


def test_a_scorer_that_is_given_leaves_no_parts(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer
) -> None:
    model = model_of(tmp_path, prefix, tokenizer)
    config = NeedleConfig(lengths=[128, 256], num_trials=2)
    with pytest.raises(UserInterrupt, match="nothing is kept"):
        run_and_store(Needle(), model, config, Stopping(CopyingScorer(), 2))
    assert not Needle().parts_path(model).exists()


def test_a_part_that_is_no_json_value_is_computed_again(tmp_path: Path) -> None:
    """Losses that are not finite end the eval with its own message, and are not kept."""
    path = tmp_path / "x.partial.json"
    with Progress("x", 1, unit="tok") as bar:
        assert Parts("x", 1, path, "k").run("a", lambda: [float("inf")], bar, 1).value
    assert not path.exists()


@pytest.mark.parametrize(("each", "config", "total"), EVALS, ids=NAMES)
def test_in_a_pipe_an_eval_prints_lines(
    tmp_path: Path, prefix: Path, tokenizer: WordTokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], each: Any, config: Any, total: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    scorer = scorer_of(each.name, tokenizer)
    run_and_store(each, model_of(tmp_path, prefix, tokenizer), config, scorer)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith(f"{each.name}: ")]
    assert len(lines) >= min(total, 3)
    assert lines[-1].startswith(f"{each.name}: 100% ")
    assert err == ""
