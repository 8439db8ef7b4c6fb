"""RULER's table of a retrieval result, and its averages."""

from __future__ import annotations

from collections.abc import Sequence

from alibi_lm.evals.retrieval.result import RulerRow, RulerTable, TaskCell
from alibi_lm.tasks.config import RULER


def ruler_table(
    cells: Sequence[TaskCell], tasks: Sequence[str], threshold: float
) -> RulerTable | None:
    """Scores in percent by length and task, averages, and the effective length; None: no task.

    A length has an average where every task has a score there. As RULER weighs them, `increasing`
    gives lengths the weights 1, 2, 3, ..., and `decreasing` the same the other way round. The
    effective length is the longest one at which, and at all shorter ones, the average is at least
    the threshold.

    Args:
        cells: a result's.
        tasks: names of the tasks that were run.
        threshold: average score in percent.
    """
    columns = [name for name in RULER if name in tasks]
    if not columns:
        return None
    scores: dict[int, dict[str, float]] = {}
    for cell in cells:
        if cell.task in columns:
            scores.setdefault(cell.length, {})[cell.task] = 100 * cell.score.rate
    rows = []
    for length in sorted(scores):
        row = scores[length]
        average = sum(row.values()) / len(row) if len(row) == len(columns) else None
        rows.append(RulerRow(length=length, scores=row, average=average))
    averages = [(row.length, row.average) for row in rows if row.average is not None]
    return RulerTable(
        columns=columns,
        rows=rows,
        average=_weighted([1.0] * len(averages), averages),
        increasing=_weighted(list(range(1, len(averages) + 1)), averages),
        decreasing=_weighted(list(range(len(averages), 0, -1)), averages),
        threshold=threshold,
        effective_length=_effective(averages, threshold),
        longest=averages[-1][0] if averages else None,
    )


def _weighted(weights: Sequence[float], averages: Sequence[tuple[int, float]]) -> float | None:
    if not averages:
        return None
    pairs = zip(weights, averages, strict=True)
    return sum(weight * average for weight, (_, average) in pairs) / sum(weights)


def _effective(averages: Sequence[tuple[int, float]], threshold: float) -> int | None:
    effective = None
    for length, average in averages:
        if average < threshold:
            break
        effective = length
    return effective


def effective_words(table: RulerTable) -> str:
    """The effective length in words."""
    if table.longest is None:
        return "No length has a score of every task, so there is no average."
    effective = table.effective_length
    if effective is None:
        first = next(row.length for row in table.rows if row.average is not None)
        return f"Effective length at {table.threshold:g}%: below {first:,}."
    more = " or more" if effective == table.longest else ""
    return f"Effective length at {table.threshold:g}%: {effective:,}{more}."


SHORT = {"niah_": "", "single_": "s", "multikey_": "mk", "multivalue": "mv", "multiquery": "mq"}
"""How names of tasks are shortened in the terminal."""


def short_name(task: str) -> str:
    """A column's name for the terminal."""
    for long, short in SHORT.items():
        task = task.replace(long, short)
    return task


def table_lines(table: RulerTable) -> list[str]:
    """The table for the terminal."""
    names = [short_name(task) for task in table.columns]
    lines = [f"{'length':>8}" + "".join(f"{name:>7}" for name in (*names, "avg"))]
    for row in table.rows:
        values = [row.scores.get(task) for task in table.columns] + [row.average]
        shown = "".join(f"{'-' if value is None else f'{value:.1f}':>7}" for value in values)
        lines.append(f"{row.length:>8,}{shown}")
    if table.average is not None:
        lines.append(
            f"average {table.average:.1f}, weighted by length {table.increasing:.1f} (inc), "
            f"{table.decreasing:.1f} (dec). {effective_words(table)}"
        )
    else:
        lines.append(effective_words(table))
    return lines
