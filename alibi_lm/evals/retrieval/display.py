"""Retrieval and needle results as lines, pictures and tables of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from alibi_lm.evals.base import Cell, Comparison
from alibi_lm.evals.models.scorer import ANSWERS_DENSE_UP_TO
from alibi_lm.evals.perplexity.display import tolerance_lines
from alibi_lm.evals.report import plots
from alibi_lm.evals.report.plots import INK
from alibi_lm.evals.retrieval.result import NeedleCell, NeedleResult, RetrievalResult
from alibi_lm.evals.retrieval.ruler_table import table_lines
from alibi_lm.evals.statistics import Share


def retrieval_table(result: RetrievalResult) -> list[str]:
    """Base scores, RULER's table, the passkey's k_max and what each task shows."""
    lines = [f"{'task':>16}  {'shortest':>8}  generation, without the facts; ranking (chance)"]
    chances = {task.name: task.chance for task in result.tasks}
    for cell in result.base:
        ranking = "-"
        if cell.ranking is not None:
            ranking = f"{cell.ranking} ({chances[cell.task]:.0%})"
        lines.append(
            f"{cell.task:>16}  {cell.length:>8,}  {cell.score}, {cell.control.score}; {ranking}"
        )
    if result.table is not None:
        lines += ["RULER, scores in percent", *table_lines(result.table)]
        changed = [task.name for task in result.tasks if task.ruler and not task.published]
        if changed:
            lines.append(f"not of RULER's own sizes or texts: {', '.join(changed)}")
    for row in result.passkey.k_max if result.passkey else []:
        distance = "none" if row.k_max is None else f"{row.k_max:,} tokens"
        lines.append(f"passkey, length {row.length:,}: k_max {distance}")
    lines += tolerance_lines(result.model, result.lengths, ANSWERS_DENSE_UP_TO)
    return lines + [verdict.text for verdict in result.verdicts]


def needle_table(result: NeedleResult) -> list[str]:
    """The best and the worst cell, generation, the closed-book rate and scores by distance."""

    def words(cell: NeedleCell) -> str:
        return f"{cell.ranking} at length {cell.length:,}, depth {cell.depth:.0%}"

    best = max(result.cells, key=lambda cell: cell.ranking.rate)
    worst = min(result.cells, key=lambda cell: cell.ranking.rate)
    blind = sum(row.control.ranking.rate for row in result.by_length) / len(result.by_length)
    generated = max(result.by_length, key=lambda row: row.generation.rate)
    return [
        f"needle, ranking among {result.num_candidates} (chance {result.chance:.0%}; "
        f"control without a needle: {blind:.0%}):",
        f"  best cell   {words(best)}",
        f"  worst cell  {words(worst)}",
        f"  generation, best length {generated.length:,}: {generated.generation}",
        *(
            f"  more than {row.above:,} and up to {row.up_to:,} tokens back: "
            f"{row.ranking} by ranking, {row.generation} by generation"
            for row in result.by_distance
        ),
        *tolerance_lines(result.model, result.lengths, ANSWERS_DENSE_UP_TO),
    ]


def needle_figures(result: NeedleResult) -> dict[str, Figure]:
    """Depth by length heatmaps of ranking and of generation, and both by distance."""
    lengths, depths = result.lengths, result.depths
    size = (max(10.5, 3.4 + 1.1 * len(lengths)), 2.2 + 0.5 * len(depths))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    cells = {(cell.length, cell.depth): cell for cell in result.cells}
    names = [f"{depth:.0%}" for depth in depths]
    ranking = np.array([[cells[n, d].ranking.rate for n in lengths] for d in depths])
    generation = np.array([[cells[n, d].generation.rate for n in lengths] for d in depths])
    image = plots.heatmap(left, ranking, names, lengths, result.training_length)
    plots.heatmap(right, generation, names, lengths, result.training_length)
    plots.title(left, f"Closed-set ranking (chance {result.chance:.0%})")
    plots.title(right, "Greedy generation, exact (chance 0%)")
    left.set_ylabel("needle's depth", color=INK)
    plots.color_bar(figure, image, [left, right], fraction=0.03, pad=0.01)
    groups = {
        "ranking": [(row.up_to, row.ranking) for row in result.by_distance],
        "generation": [(row.up_to, row.generation) for row in result.by_distance],
    }
    heading = "Needle by distance (bins up to the distance shown)"
    by_distance = distance_figure(groups, result.training_length, heading)
    return {"needle": figure, "needle_distance": by_distance}


def retrieval_figures(result: RetrievalResult) -> dict[str, Figure]:
    """Task by length heatmap of scores, and the passkey by distance.

    A task and length without prompts stays empty.
    """
    lengths, names = result.lengths, [task.name for task in result.tasks]
    size = (max(9.0, 3.6 + 1.1 * len(lengths)), 1.9 + 0.42 * len(names))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots()
    rates = {(cell.task, cell.length): cell.score.rate for cell in result.cells}
    grid = np.array([[rates.get((name, n), np.nan) for n in lengths] for name in names])
    image = plots.heatmap(axes, grid, names, lengths, result.training_length)
    plots.title(axes, "Share of answers found by generation")
    plots.color_bar(figure, image, axes)
    if result.passkey is None:
        return {"retrieval": figure}
    rows = result.passkey.rows
    groups = {
        f"length {length:,}": [(row.distance, row.score) for row in rows if row.length == length]
        for length in sorted({row.length for row in rows})
    }
    heading = "Passkey by distance, generation"
    return {
        "retrieval": figure,
        "passkey": distance_figure(groups, result.training_length, heading),
    }


def distance_figure(
    groups: Mapping[str, Sequence[tuple[int, Share]]], training_length: int, heading: str
) -> Figure:
    """Shares against the distance of the needed fact.

    Args:
        groups: by label, distances in tokens and shares.
        training_length: is marked.
        heading: title of the picture.
    """
    figure, axes = plots.axes_of(9, 4.2)
    colors = (plots.BLUE, *plots.SERIES[1:])
    for index, (label, rows) in enumerate(groups.items()):
        color, xs = colors[index % len(colors)], [x for x, _ in rows]
        rates = [share.rate for _, share in rows]
        axes.plot(xs, rates, color=color, marker="o", markersize=5, linewidth=1.8, label=label)
        low, high = zip(*(share.interval for _, share in rows), strict=True)
        axes.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
    plots.mark_training_length(axes, training_length)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    plots.share_axis(axes)
    axes.set_xlabel("tokens from the fact to the end of the prompt", color=INK)
    axes.set_ylabel("right", color=INK)
    plots.legend_below(axes)
    plots.title(axes, heading)
    return figure


def compare_needles(results: Mapping[str, NeedleResult]) -> Comparison:
    """Needles found by ranking at each length, as a table and a picture."""
    by_length = {
        name: {row.length: row.ranking.rate for row in result.by_length}
        for name, result in results.items()
    }
    curves = {name: list(rates.items()) for name, rates in by_length.items()}
    figure = plots.lines_figure(
        "Needles found by ranking", "prompt length (tokens)", "share found", curves, share=True
    )
    table = compare_tasks({name: {"needle (ranking)": rates} for name, rates in by_length.items()})
    return Comparison(figures={"needle": figure}, columns=table.columns, rows=table.rows)


def compare_tasks(scores: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Comparison:
    """A row a task and model; `scores` are shares by model, task and length."""
    lengths = sorted({n for tasks in scores.values() for rates in tasks.values() for n in rates})
    names = dict.fromkeys(task for tasks in scores.values() for task in tasks)
    rows = [
        [
            Cell(task),
            Cell(model),
            *(Cell(f"{rates[n]:.0%}") if n in rates else Cell("–") for n in lengths),
        ]
        for task in names
        for model, tasks in scores.items()
        if (rates := tasks.get(task)) is not None
    ]
    return Comparison(columns=["task", "model", *(f"{n:,}" for n in lengths)], rows=rows)
