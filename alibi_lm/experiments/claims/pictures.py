"""The claims page's plots: means over seeds, every seed a thin line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from alibi_lm.evals.report.plots import INK, SERIES, TRAINING, axes_of, mark_lengths, title
from alibi_lm.experiments.claims.measurements import Measurements

Series = Mapping[str, np.ndarray]
"""Name to `[seeds, points]`."""


def pictures(measured: Measurements) -> dict[str, Figure]:
    """Every plot that the measured has data for, by file name without ending."""
    figures = {}
    text = [model for group, model in measured.runs if group == "text"]
    same = [model for model in text if measured.trained(model) == measured.trained(text[0])]
    if same:
        lengths = measured.lengths(same[0])
        series = {
            model: np.exp(np.stack([measured.losses(model, n) for n in lengths], 1))
            for model in same
        }
        figures["perplexity"] = _figure(
            "Perplexity by window length, same tokens at every length",
            "window length (tokens)",
            "perplexity (log scale)",
            lengths,
            series,
            measured.trained(same[0]),
            log=True,
        )
    recall = _recall_series(measured)
    if recall is not None:
        distances, shares, trained = recall
        figures["recall"] = _figure(
            "Needles found by ranking (10% by chance)",
            "distance (tokens)",
            "share found",
            distances,
            shares,
            trained,
        )
    items = _generalization_series(measured)
    if items is not None:
        counts, shares, trained = items
        figures["generalization"] = _figure(
            "Exact answers, mean over tasks",
            "items of the problem",
            "share right",
            counts,
            shares,
            trained,
            log_x=False,
        )
    return figures


def _recall_series(measured: Measurements) -> tuple[list[int], Series, int] | None:
    names = [model for group, model in measured.runs if group == "recall"]
    if not names:
        return None
    trained = measured.trained(names[0], "recall")
    series: dict[str, np.ndarray] = {}
    edges: list[int] = []
    for name in names:
        runs = measured.of("recall", name)
        for variant in runs[0]["variants"]:
            by_distance = [_by_distance(run["variants"][variant]) for run in runs]
            edges = sorted(by_distance[0])
            label = name if variant == "plain" else f"{name}, {variant}"
            series[label] = np.array([[shares[edge] for edge in edges] for shares in by_distance])
    return edges, series, trained


def _by_distance(cells: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Share found, by distances that double."""
    counts: dict[int, list[float]] = {}
    for cell in cells:
        edge = 1 << max(0, math.ceil(math.log2(max(1, cell["distance"]))))
        count = counts.setdefault(edge, [0, 0])
        count[0] += cell["ranking"]
        count[1] += cell["trials"]
    return {edge: right / trials for edge, (right, trials) in counts.items()}


def _generalization_series(measured: Measurements) -> tuple[list[int], Series, int] | None:
    names = [model for group, model in measured.runs if group == "generalization"]
    if not names:
        return None
    first = measured.of("generalization", names[0])[0]
    counts = sorted({int(cell["items"]) for cell in first["cells"]})
    series = {
        name: np.array(
            [
                [np.mean([c["rate"] for c in run["cells"] if c["items"] == n]) for n in counts]
                for run in measured.of("generalization", name)
            ]
        )
        for name in names
    }
    return counts, series, int(first["trained_items"])


def _figure(
    heading: str,
    x_label: str,
    y_label: str,
    points: Sequence[int],
    series: Series,
    trained: int,
    *,
    log: bool = False,
    log_x: bool = True,
) -> Figure:
    figure, axes = axes_of(9, 4.6)
    for index, (name, values) in enumerate(series.items()):
        color, dashes = SERIES[index % len(SERIES)], "-" if index < len(SERIES) else "--"
        for seed in values:
            axes.plot(points, seed, color=color, linewidth=0.6, alpha=0.35, linestyle=dashes)
        mean = np.exp(np.log(values).mean(0)) if log else values.mean(0)
        axes.plot(
            points,
            mean,
            color=color,
            linewidth=2,
            marker="o",
            markersize=4.5,
            linestyle=dashes,
            label=name,
        )
    axes.axvline(trained, color=TRAINING, linestyle="--", linewidth=1.3, label="trained")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if log_x:
        axes.set_xscale("log", base=2)
    mark_lengths(axes, points)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK, ncols=2)
    title(axes, heading)
    return figure
