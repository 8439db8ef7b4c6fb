"""Does a model that was trained on short problems solve longer ones?"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.base import Eval, register
from alibi_lm.evals.config import GeneralizationConfig
from alibi_lm.evals.generalization import result as shown
from alibi_lm.evals.generalization.result import GeneralizationCell, GeneralizationResult
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer, checked_scores
from alibi_lm.evals.statistics import Share
from alibi_lm.tasks.reasoning import END, TASKS, Question, question
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

DEFAULT_LENGTHS = tuple(range(5, 45, 5))
PROTOCOL = (
    "A prompt is one problem up to its marker, from the first position on, as in training. Exact: "
    "greedy decoding gives the whole answer and then the end of the line. Teacher-forced: share of "
    "the answer's tokens that get more than half of the probability, given the right ones before "
    "them (which makes each the greedy choice). Items are letters of copying and sorting and "
    "digits of each term of an addition. Intervals: 95% Wilson."
)


@dataclass(frozen=True)
class ProblemTrial:
    """One problem and its token ids."""

    question: Question
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class ProblemTally:
    """Counts of right answers to the problems of one task and length."""

    trials: int = 0
    exact: int = 0
    tokens: int = 0
    likely_tokens: int = 0
    loss: float = 0.0

    def cell(self, task: str, items: int) -> GeneralizationCell:
        """The counts as rates, with the interval of the exact answers."""
        return GeneralizationCell(
            **vars(Share.of(self.exact, self.trials)),
            task=task,
            items=items,
            trials=self.trials,
            teacher_forced=self.likely_tokens / self.tokens,
            loss=self.loss / self.tokens,
        )


def make_trials(
    tokenizer: Tokenizer, task: str, items: int, config: GeneralizationConfig
) -> list[ProblemTrial]:
    """The problems of a task and length: a pure function of the seed.

    Raises:
        DataError: the tokenizer cannot write one.
    """
    trials = []
    for index in range(config.num_trials):
        generator = np.random.default_rng([config.seed, TASKS.index(task), items, index])
        asked = question(task, items, generator)
        prompt, answer = tokenizer.encode(asked.prompt), tokenizer.encode(asked.answer)
        written, wanted = tokenizer.decode([*prompt, *answer]), asked.prompt + asked.answer
        # Spaces aside, of which some tokenizers put one before each piece.
        if "".join(written.split()) != "".join(wanted.split()):
            rule = f"cannot write {wanted!r}: it reads back as {written!r}"
            fix = "use a tokenizer with digits and letters"
            raise DataError(Problem("tokenizer", None, rule, fix))
        trials.append(ProblemTrial(asked, tuple(prompt), tuple(answer)))
    return trials


def score_trials(
    scorer: Scorer, tokenizer: Tokenizer, trials: Sequence[ProblemTrial], batch_tokens: int
) -> ProblemTally:
    """Score problems in batches of equal sizes."""
    tally = ProblemTally()
    num_end = len(tokenizer.encode(END))
    for batch in _batches(trials, batch_tokens, scorer.dp_size):
        prompts = torch.tensor([trial.prompt for trial in batch])
        answers = torch.tensor([trial.answer for trial in batch])
        size = answers.shape[1]
        losses = checked_scores(scorer.token_losses(torch.cat([prompts, answers], 1)))[:, -size:]
        nothing = torch.empty(len(batch), 1, 0, dtype=torch.int64)
        generated = scorer.loglikelihood_and_generate(prompts, nothing, size + num_end).generated
        for trial, new in zip(batch, generated.tolist(), strict=True):
            text, end, _ = tokenizer.decode(new).partition(END)
            tally.exact += bool(end) and text.strip() == trial.question.answer.strip()
        tally.trials += len(batch)
        tally.tokens += losses.numel()
        tally.likely_tokens += int((losses < math.log(2)).sum())
        tally.loss += float(losses.double().sum())
    return tally


def _batches(
    trials: Sequence[ProblemTrial], batch_tokens: int, dp_size: int
) -> Iterator[list[ProblemTrial]]:
    groups: dict[tuple[int, int], list[ProblemTrial]] = defaultdict(list)
    for trial in trials:
        groups[len(trial.prompt), len(trial.answer)].append(trial)
    for (prompt, answer), group in groups.items():
        size = dp_size * max(1, batch_tokens // (prompt + answer))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def usable_lengths(
    eval_model: EvalModel, tokenizer: Tokenizer, config: GeneralizationConfig
) -> list[int]:
    """The lengths whose problems fit the model's positions.

    Raises:
        ConfigError: a length that was asked for, or every default one, does not fit.
    """
    asked = sorted(config.lengths or DEFAULT_LENGTHS)
    limit = eval_model.max_input_length
    if limit is None:
        return asked
    fitting, problems = [], []
    for items in asked:
        trials = (t for task in config.tasks for t in make_trials(tokenizer, task, items, config))
        longest = max(len(trial.prompt) + len(trial.answer) for trial in trials)
        longest += len(tokenizer.encode(END))
        if longest <= limit:
            fitting.append(items)
        else:
            rule = f"takes {longest} tokens, and the model has {limit} positions"
            problems.append(Problem("generalization.lengths", items, rule, "leave it out"))
    if problems and (config.lengths is not None or not fitting):
        raise ConfigError(*problems)
    for problem in problems:
        console.warning(f"left out by default: {problem}")
    return fitting


@register
class Generalization(Eval[GeneralizationConfig, GeneralizationResult]):
    """Problems with more items than were trained."""

    name = "generalization"
    help = "Copying, addition and sorting with more items than were trained."
    title = "Longer problems than trained"
    config = GeneralizationConfig
    result = GeneralizationResult
    reads_corpus = False
    template = "generalization.html"

    def run(
        self, eval_model: EvalModel, config: GeneralizationConfig, scorer: Scorer | None = None
    ) -> GeneralizationResult:
        """Ask all problems.

        Raises:
            DataError: the model has no tokenizer, or one that cannot write the problems.
            ConfigError: a length beyond the positions of the model.
        """
        tokenizer = eval_model.require_tokenizer("problems")
        lengths = usable_lengths(eval_model, tokenizer, config)
        own = None
        if scorer is None:
            scorer = own = eval_model.scorer(config.precision, scaling=config.scaling)

        def score(task: str, items: int) -> dict[str, float]:
            trials = make_trials(tokenizer, task, items, config)
            tally = score_trials(scorer, tokenizer, trials, config.batch_tokens)
            progress.advance(1)
            return vars(tally)

        cells, seconds = [], 0.0
        total = len(config.tasks) * len(lengths)
        with (
            self.parts(eval_model, config, (), own, total) as parts,
            Progress(self.name, total, unit="cells") as progress,
        ):
            for task, items in itertools.product(config.tasks, lengths):
                part = parts.run(f"{task} {items}", partial(score, task, items), progress, 1)
                seconds += part.seconds
                cells.append(ProblemTally(**part.value).cell(task, items))
        examples = {task: make_trials(tokenizer, task, lengths[0], config)[0].question
                    for task in config.tasks}  # fmt: skip
        return GeneralizationResult(
            **self.common(eval_model, config),
            protocol=PROTOCOL,
            tasks=list(config.tasks),
            lengths=lengths,
            trained_items=config.trained_items,
            threshold=config.threshold,
            num_trials=config.num_trials,
            seed=config.seed,
            examples={task: "".join(asked.pieces[:2]) for task, asked in examples.items()},
            precision=config.precision,
            model=scorer.describe(),
            seconds=round(seconds, 3),
            cells=cells,
            verdict=shown.verdict(cells, config.trained_items, config.threshold),
        )

    def table(self, result: GeneralizationResult) -> list[str]:
        """Exact answers by task and length."""
        return shown.table(result)

    def figures(self, result: GeneralizationResult) -> dict[str, Figure]:
        """Exact answers against items."""
        return {self.name: shown.figure(result)}

    def scalars(self, result: GeneralizationResult) -> Iterator[tuple[str, float]]:
        """Share of exact answers by task and items."""
        for cell in result.cells:
            yield f"eval_generalization_{cell.task}/{cell.items}", cell.rate

    def expected_of(self, eval_model: EvalModel) -> bool:
        """Never: a model does not state whether it was trained on such problems."""
        return False
