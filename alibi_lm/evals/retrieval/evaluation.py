"""Retrieval tasks by length: the passkey, associative recall and RULER's synthetic tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from alibi_lm.evals.base import Comparison, Eval, Json, chosen_lengths, register
from alibi_lm.evals.config import RetrievalConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.retrieval import display
from alibi_lm.evals.retrieval.result import (
    LeftOut,
    PasskeyKMax,
    PasskeyRow,
    PasskeyTable,
    RetrievalResult,
    Scores,
    TaskBin,
    TaskCell,
    TaskInfo,
)
from alibi_lm.evals.retrieval.ruler_table import effective_words, ruler_table
from alibi_lm.evals.retrieval.scoring import Counts, RetrievalTally, score_all
from alibi_lm.evals.retrieval.verdict import retrieval_verdict, task_verdict
from alibi_lm.tasks.config import RULER, default_tasks
from alibi_lm.tasks.haystack import Haystack
from alibi_lm.tasks.passkey import SUCCESS, Passkey, k_max
from alibi_lm.tasks.prompt import Task
from alibi_lm.tasks.registry import FROM_CORPUS, make_tasks
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.logging import console

PROTOCOL = (
    "Prompts are assembled from token ids and end with the beginning of the answer; greedy "
    "decoding continues them, up to a token that ends a document. A length includes the tokens "
    "reserved for the answer. Where the haystack is a corpus or the passkey's filler it is exact; "
    "lines, documents and words are added as long as they fit, and the real lengths are stated. "
    "RULER's tasks have its words, sizes and metrics (the share of references found in the answer; "
    "qa: any of them), with lines of the corpus in place of essays; what is said to be of other "
    "sizes is not RULER's. The passkey and mqar count when the answer begins with the right "
    "number. Ranking: the right continuation is the likeliest of a closed set of equally many "
    "tokens. Control: prompts without the needed facts. Far: a needed fact lies more than the "
    "training length before the prompt's end. Intervals: 95% Wilson."
)


@register
class Retrieval(Eval[RetrievalConfig, RetrievalResult]):
    """Retrieval tasks by length."""

    name = "retrieval"
    help = "The passkey, associative recall and RULER's tasks, by length."
    title = "Retrieval tasks"
    config = RetrievalConfig
    result = RetrievalResult
    template = "retrieval.html"

    def run(
        self, eval_model: EvalModel, config: RetrievalConfig, scorer: Scorer | None = None
    ) -> RetrievalResult:
        """Run the tasks on a model.

        Raises:
            DataError: no corpus, no tokenizer, one that cannot write numbers, or a wrong qa file.
            ConfigError: a task does not fit a length that was asked for, or any length.
        """
        tokenizer = eval_model.require_tokenizer("prompts")
        files = self.open_corpora(eval_model, config)
        names = config.tasks or default_tasks(len(config.qa_files))
        qa_files = [Path(path) for path in config.qa_files]
        tasks = make_tasks(names, tokenizer, files, config.seed, config.sizes, qa_files)
        chosen = chosen_lengths(eval_model, config.lengths)
        haystack = Haystack(tokenizer, files)
        fitting, left_out = fitting_cells(tasks, chosen, haystack, config.lengths is not None)
        own = None
        if scorer is None:
            scorer = own = eval_model.scorer(
                config.precision, config.pruning_tolerance, config.scaling
            )
        training_length = eval_model.training_length
        with self.parts(eval_model, config, files, own, len(fitting)) as parts:
            counts, seconds = score_all(scorer, tokenizer, fitting, config, training_length, parts)
        return RetrievalResult(
            **self.common(eval_model, config, files),
            protocol=PROTOCOL,
            num_trials=config.num_trials,
            seed=config.seed,
            precision=config.precision,
            model=scorer.describe(),
            seconds=round(seconds, 3),
            sizes=config.sizes,
            left_out=[
                LeftOut(task=task, length=length, reason=problem.rule)
                for task, length, problem in left_out
            ],
            **summary(counts, fitting, config.threshold),
        )

    def table(self, result: RetrievalResult) -> list[str]:
        """Base scores, RULER's table and what each task shows."""
        return display.retrieval_table(result)

    def figures(self, result: RetrievalResult) -> dict[str, Figure]:
        """Scores by task and length, and the passkey by distance."""
        return display.retrieval_figures(result)

    def scalars(self, result: RetrievalResult) -> Iterator[tuple[str, float]]:
        """Scores by task and length."""
        for cell in result.cells:
            yield f"eval_retrieval_{cell.task}/{cell.length}", cell.score.rate

    def report_values(self, result: RetrievalResult) -> dict[str, Any]:
        """The effective length in words, and the tasks' sizes."""
        effective = effective_words(result.table) if result.table else ""
        return {"effective": effective, "sizes": vars(result.sizes)}

    def compare(self, results: Mapping[str, RetrievalResult]) -> Comparison:
        """Scores by task, model and length."""
        return display.compare_tasks({
            name: {
                task.name: {c.length: c.score.rate for c in result.cells if c.task == task.name}
                for task in result.tasks
            }
            for name, result in results.items()
        })  # fmt: skip

    def extra_inputs(self, config: RetrievalConfig) -> Json:
        """Digests of the question files."""
        digests = [_digest(Path(path)) for path in config.qa_files]
        return {"qa_files": digests} if digests else {}


def _digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        DataError: there is none.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise DataError(Problem(str(path), None, "no such file", "check the path")) from None


Unfit = tuple[str, int, Problem]
"""Task, length and why there is no such prompt."""


def fitting_cells(
    tasks: Sequence[Task], lengths: Sequence[int], haystack: Haystack, asked_for: bool
) -> tuple[list[tuple[Task, int]], list[Unfit]]:
    """The tasks and lengths that go together; those that do not are left out with a warning.

    Raises:
        ConfigError: lengths that were asked for do not fit, or nothing does.
    """
    fitting: list[tuple[Task, int]] = []
    left_out: list[Unfit] = []
    for task in tasks:
        for length in lengths:
            problem = _problem(task, length, haystack)
            if problem is None:
                fitting.append((task, length))
            else:
                left_out.append((task.name, length, problem))
    problems = [problem for _, _, problem in left_out]
    if problems and (asked_for or not fitting):
        raise ConfigError(*problems)
    _warn(left_out)
    return fitting, left_out


def _warn(left_out: Sequence[Unfit]) -> None:
    """One line for each task and reason."""
    lengths: dict[tuple[str, str], list[str]] = {}
    for task, length, problem in left_out:
        lengths.setdefault((task, problem.rule), []).append(f"{length:,}")
    for (task, rule), which in lengths.items():
        console.warning(f"left out by default: {task} at {', '.join(which)}: {rule}")


def _problem(task: Task, length: int, haystack: Haystack) -> Problem | None:
    """Why a task has no prompt of a length."""
    key = "retrieval.lengths"
    try:
        shortest = task.shortest(length)
    except DataError as error:
        return error.problems[0]
    if length < shortest:
        rule = f"{task.name} needs at least {shortest:,} tokens"
        fix = "leave the length or the task out, or make it smaller by retrieval.sizes"
        return Problem(key, length, rule, fix)
    return haystack.problem(key, length) if task.name in FROM_CORPUS else None


def summary(counts: Counts, fitting: Sequence[tuple[Task, int]], threshold: float) -> Json:
    """The fields of a result that follow from the counts."""
    tasks = list({task.name: task for task, _ in fitting}.values())
    cells = [_cell(task.name, length, counts) for task, length in fitting]
    of_task = {task.name: [cell for cell in cells if cell.task == task.name] for task in tasks}
    verdicts = [
        task_verdict(task.name, of_task[task.name], task.chance, counts.training_length)
        for task in tasks
    ]
    return {
        "tasks": [
            TaskInfo(
                name=task.name,
                metric=task.metric,
                chance=task.chance,
                ruler=task.name in RULER,
                published=task.published,
            )
            for task in tasks
        ],
        "lengths": sorted({length for _, length in fitting}),
        "cells": cells,
        "base": [of_task[task.name][0] for task in tasks],
        "by_distance": [
            TaskBin(task=name, above=low, up_to=high, **vars(_scores(tally)))
            for (name, (low, high)), tally in sorted(counts.bins.items())
        ],
        "passkey": _passkey(counts) if any(isinstance(task, Passkey) for task in tasks) else None,
        "table": ruler_table(cells, [task.name for task in tasks], threshold),
        "verdicts": verdicts,
        "verdict": retrieval_verdict(verdicts, counts.training_length),
    }


def _scores(tally: RetrievalTally) -> Scores:
    """Of a tally that has counted prompts."""
    scores = tally.scores()
    assert scores is not None
    return scores


def _cell(task: str, length: int, counts: Counts) -> TaskCell:
    cell = counts.cells[task, length]
    return TaskCell(
        **vars(_scores(cell.all)),
        task=task,
        length=length,
        real_length=(cell.least, cell.most),
        near=cell.near.scores(),
        far=cell.far.scores(),
        control=_scores(cell.control),
    )


def _passkey(counts: Counts) -> PasskeyTable:
    """The passkey by absolute distance, and Position Interpolation's k_max at each length."""
    rows = [
        PasskeyRow(length=length, distance=distance, **vars(_scores(tally)))
        for (length, distance), tally in sorted(counts.asked.items())
    ]
    k_max_rows = []
    for length in sorted({length for length, _ in counts.asked}):
        rates = [(row.distance, row.score.rate) for row in rows if row.length == length]
        k_max_rows.append(PasskeyKMax(length=length, k_max=k_max(rates)))
    return PasskeyTable(rows=rows, success=SUCCESS, k_max=k_max_rows)
