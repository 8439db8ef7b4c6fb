"""Scores a model on the prompts of retrieval tasks, and counts right answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.config import RetrievalConfig
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.parts import Parts
from alibi_lm.evals.retrieval.distance_bins import Bin, distance_bin
from alibi_lm.evals.retrieval.result import Scores
from alibi_lm.evals.statistics import Share
from alibi_lm.tasks.metrics import METRICS
from alibi_lm.tasks.passkey import Passkey
from alibi_lm.tasks.prompt import Prompt, Task
from alibi_lm.utils.progress import Progress


@dataclass
class RetrievalTally:
    """Scores of some prompts."""

    trials: int = 0
    total: float = 0.0
    """Sum of the metric's scores, each 0 to 1."""
    whole: int = 0
    """Prompts in whose answer everything was found."""
    ranked: int | None = None
    """Prompts whose right candidate was the likeliest; None: no closed set."""

    def add(self, score: float, ranked: bool | None) -> None:
        """Count one prompt."""
        self.trials += 1
        self.total += score
        self.whole += score == 1
        if ranked is not None:
            self.ranked = (self.ranked or 0) + ranked

    def scores(self) -> Scores | None:
        """The scores with intervals; None without prompts."""
        if self.trials == 0:
            return None
        return Scores(
            trials=self.trials,
            score=Share.of(self.total, self.trials),
            whole=Share.of(self.whole, self.trials),
            ranking=None if self.ranked is None else Share.of(self.ranked, self.trials),
        )


@dataclass
class CellTally:
    """A task at a length."""

    all: RetrievalTally = field(default_factory=RetrievalTally)
    near: RetrievalTally = field(default_factory=RetrievalTally)
    """Prompts whose facts all lie within the training length of the prompt's end."""
    far: RetrievalTally = field(default_factory=RetrievalTally)
    """Prompts with a needed fact farther back."""
    control: RetrievalTally = field(default_factory=RetrievalTally)
    least: int = 0
    """Real length of the shortest prompt."""
    most: int = 0


class Outcome(NamedTuple):
    """What came of one prompt."""

    control: bool
    length: int
    """The prompt's real length."""
    distance: int
    """Tokens from the farthest needed fact to the end of the prompt."""
    asked: int | None
    """The distance that was asked for, of a passkey."""
    score: float
    ranked: bool | None


@dataclass
class Counts:
    """Everything that was counted."""

    training_length: int
    cells: dict[tuple[str, int], CellTally] = field(default_factory=lambda: defaultdict(CellTally))
    bins: dict[tuple[str, Bin], RetrievalTally] = field(
        default_factory=lambda: defaultdict(RetrievalTally)
    )
    asked: dict[tuple[int, int], RetrievalTally] = field(
        default_factory=lambda: defaultdict(RetrievalTally)
    )
    """The passkey's, by length and asked distance."""

    def add(self, task: str, length: int, outcome: Outcome) -> None:
        """Count one prompt of a task and length."""
        cell = self.cells[task, length]
        score, ranked = outcome.score, outcome.ranked
        if outcome.control:
            cell.control.add(score, ranked)
            return
        cell.least = min(cell.least or outcome.length, outcome.length)
        cell.most = max(cell.most, outcome.length)
        far = outcome.distance > self.training_length
        for tally in (cell.all, cell.far if far else cell.near):
            tally.add(score, ranked)
        self.bins[task, distance_bin(outcome.distance, self.training_length)].add(score, ranked)
        if outcome.asked is not None:
            self.asked[length, outcome.asked].add(score, ranked)


Item = tuple[Prompt, bool]
"""A prompt, and whether it is a control."""


def num_prompts(task: Task, config: RetrievalConfig) -> int:
    """Prompts of a task at one length, controls aside."""
    places = task.num_distances if isinstance(task, Passkey) else 1
    return config.num_trials * places


def score_all(
    scorer: Scorer,
    tokenizer: Tokenizer,
    cells: Sequence[tuple[Task, int]],
    config: RetrievalConfig,
    training_length: int,
    parts: Parts,
) -> tuple[Counts, float]:
    """Score the prompts of every cell, and its controls; each cell is a part.

    Returns:
        The counts, and seconds.
    """
    counts, seconds = Counts(training_length), 0.0
    controls = math.ceil(config.num_trials / 2)
    sizes = [length * (num_prompts(task, config) + controls) for task, length in cells]

    def outcomes(task: Task, length: int) -> list[Outcome]:
        items = [(index, False) for index in range(num_prompts(task, config))]
        items += [(index, True) for index in range(controls)]
        prompts = ((task.prompt(length, *item), item[1]) for item in items)
        result = []
        for batch in equal_batches(prompts, config.batch_tokens, scorer.dp_size):
            answers = _ask(scorer, tokenizer, task, batch)
            for (prompt, control), answer in zip(batch, answers, strict=True):
                facts = (control, prompt.length, prompt.distance, prompt.counts.get("asked"))
                result.append(Outcome(*facts, *answer))
            progress.advance(length * len(batch))
        return result

    with Progress("retrieval", sum(sizes), unit="tok") as progress:
        for (task, length), size in zip(cells, sizes, strict=True):
            compute = partial(outcomes, task, length)
            part = parts.run(f"{task.name} {length}", compute, progress, size)
            seconds += part.seconds
            for outcome in part.value:
                counts.add(task.name, length, Outcome(*outcome))
    return counts, seconds


def equal_batches(
    items: Iterator[Item], batch_tokens: int, dp_size: int = 1
) -> Iterator[list[Item]]:
    """Batches of prompts of equal length, about `batch_tokens` for each replica of the model.

    A scorer takes no padding: prompts wait until there is a whole batch of their length, but never
    more than four batches' tokens of them in all.
    """
    waiting: dict[int, list[Item]] = defaultdict(list)
    held = 0
    for item in items:
        size = len(item[0].tokens)
        waiting[size].append(item)
        held += size
        if len(waiting[size]) >= dp_size * max(1, batch_tokens // size):
            held -= size * len(waiting[size])
            yield waiting.pop(size)
        while held > 4 * dp_size * batch_tokens:
            largest = max(waiting, key=lambda n: n * len(waiting[n]))
            held -= largest * len(waiting[largest])
            yield waiting.pop(largest)
    yield from waiting.values()


def _ask(
    scorer: Scorer, tokenizer: Tokenizer, task: Task, batch: Sequence[Item]
) -> Iterator[tuple[float, bool | None]]:
    """Score and rank of each prompt of a batch."""
    prompts = [prompt for prompt, _ in batch]
    tokens = torch.from_numpy(np.stack([prompt.tokens for prompt in prompts]))
    closed = task.chance is not None
    candidates = torch.empty(len(prompts), 1, 0, dtype=torch.int64)
    if closed:
        candidates = torch.tensor([prompt.candidates for prompt in prompts])
    answers = scorer.loglikelihood_and_generate(tokens, candidates, prompts[0].answer_budget)
    best = answers.loglikelihoods.argmax(1).tolist() if closed else [None] * len(prompts)
    for prompt, choice, new in zip(prompts, best, answers.generated.tolist(), strict=True):
        new = list(takewhile(lambda token: token not in tokenizer.stop_ids, new))
        score = METRICS[task.metric](tokenizer.decode(new), prompt.references)
        yield score, None if choice is None else choice == prompt.truth
