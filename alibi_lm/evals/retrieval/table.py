"""RULER's table of a retrieval result, and its averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alibi_lm.tasks.config import RULER


def ruler_table(
    cells: Sequence[Mapping[str, Any]], tasks: Sequence[str], threshold: float
) -> dict[str, Any] | None:
    """Scores in percent by length and task, averages, and the effective length; None: no task.

    A length has an average where every task has a score there. As RULER weighs them, `increasing`
    gives lengths the weights 1, 2, 3, ..., and `decreasing` the same the other way round. The
    effective length is the longest one at which, and at all shorter ones, the average is at least
    the threshold.

    Args:
        cells: task, length and score of a result's cells.
    """
    columns = [name for name in RULER if name in tasks]
    if not columns:
        return None
    scores: dict[int, dict[str, float]] = {}
    for cell in cells:
        if cell["task"] in columns:
            row = scores.setdefault(cell["length"], {})
            row[cell["task"]] = 100 * cell["score"]["rate"]
    rows: list[dict[str, Any]] = []
    for length in sorted(scores):
        row = scores[length]
        whole = len(row) == len(columns)
        average = sum(row.values()) / len(row) if whole else None
        rows.append({"length": length, "scores": row, "average": average})
    averages = [(row["length"], row["average"]) for row in rows if row["average"] is not None]
    return {
        "columns": columns,
        "rows": rows,
        "average": _weighted([1.0] * len(averages), averages),
        "increasing": _weighted(list(range(1, len(averages) + 1)), averages),
        "decreasing": _weighted(list(range(len(averages), 0, -1)), averages),
        "threshold": threshold,
        "effective_length": _effective(averages, threshold),
        "longest": averages[-1][0] if averages else None,
    }


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


def effective_words(table: Mapping[str, Any]) -> str:
    """The effective length in words."""
    threshold, effective = table["threshold"], table["effective_length"]
    if table["longest"] is None:
        return "No length has a score of every task, so there is no average."
    if effective is None:
        first = next(row["length"] for row in table["rows"] if row["average"] is not None)
        return f"Effective length at {threshold:g}%: below {first:,}."
    more = " or more" if effective == table["longest"] else ""
    return f"Effective length at {threshold:g}%: {effective:,}{more}."


def short_name(task: str) -> str:
    """A column's name for the terminal."""
    name = task.removeprefix("niah_")
    for long, short in (("single_", "s"), ("multikey_", "mk"), ("multivalue", "mv"),
                        ("multiquery", "mq")):  # fmt: skip
        name = name.replace(long, short)
    return name


def table_lines(table: Mapping[str, Any]) -> list[str]:
    """The table for the terminal."""
    names = [short_name(task) for task in table["columns"]]
    lines = [f"{'length':>8}" + "".join(f"{name:>7}" for name in (*names, "avg"))]
    for row in table["rows"]:
        values = [row["scores"].get(task) for task in table["columns"]] + [row["average"]]
        shown = "".join(f"{'-' if value is None else f'{value:.1f}':>7}" for value in values)
        lines.append(f"{row['length']:>8,}{shown}")
    if table["average"] is not None:
        lines.append(
            f"average {table['average']:.1f}, weighted by length {table['increasing']:.1f} (inc), "
            f"{table['decreasing']:.1f} (dec). {effective_words(table)}"
        )
    else:
        lines.append(effective_words(table))
    return lines
