"""Pictures of retrieval results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from alibi_lm.evals.report.plots import (
    BLUE,
    INK,
    SERIES,
    TRAINING,
    annotate,
    axes_of,
    mark_training_length,
    title,
)


def figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """The pictures of a retrieval result by file name."""
    pictures = {"retrieval": retrieval_figure(result)}
    if result["passkey"]:
        pictures["passkey"] = passkey_figure(result)
    return pictures


def retrieval_figure(result: Mapping[str, Any]) -> Figure:
    """Task x length heatmap of scores; a cell that no prompt fits stays empty."""
    lengths = result["lengths"]
    names = [task["name"] for task in result["tasks"]]
    figure = Figure(
        figsize=(3.6 + 1.1 * len(lengths), 1.9 + 0.42 * len(names)),
        layout="constrained",
        facecolor="white",
    )
    axes = figure.subplots()
    rates = {(c["task"], c["length"]): c["score"]["rate"] for c in result["cells"]}
    grid = np.array([[rates.get((name, n), np.nan) for n in lengths] for name in names])
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    annotate(axes, grid)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(colors=INK, labelsize=10, length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("prompt length (tokens)", color=INK)
    title(axes, "Share of answers found by generation")
    mark_training_length(axes, lengths, result["training_length"])
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    bar.ax.tick_params(colors=INK, labelsize=9)
    return figure


def distance_figure(
    groups: Mapping[str, Sequence[Mapping[str, Any]]], training_length: int, heading: str
) -> Figure:
    """Rates against the distance of the needed fact.

    Args:
        groups: by label, rows of x (tokens), rate and interval.
    """
    figure, axes = axes_of(9, 4.2)
    colors = (BLUE, *SERIES[1:])
    for index, (label, rows) in enumerate(groups.items()):
        _curve(axes, rows, colors[index % len(colors)], label)
    axes.axvline(training_length, color=TRAINING, linestyle="--", linewidth=1.3,
                 label="training length")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("tokens from the fact to the end of the prompt", color=INK)
    axes.set_ylabel("right", color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    title(axes, heading)
    return figure


def _curve(axes: Axes, rows: Sequence[Mapping[str, Any]], color: str, label: str) -> None:
    xs = [row["x"] for row in rows]
    rates = [row["rate"] for row in rows]
    axes.plot(xs, rates, color=color, marker="o", markersize=5, linewidth=1.8, label=label)
    low, high = zip(*(row["interval"] for row in rows), strict=True)
    axes.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)


def needle_distance_figure(result: Mapping[str, Any]) -> Figure:
    """The needle's ranking and generation by absolute distance."""
    groups = {
        label: [{"x": row["up_to"], **row[key]} for row in result["by_distance"]]
        for label, key in (("ranking", "ranking"), ("generation", "generation"))
    }
    heading = "Needle by distance (bins up to the distance shown)"
    return distance_figure(groups, result["training_length"], heading)


def passkey_figure(result: Mapping[str, Any]) -> Figure:
    """The passkey's generation by absolute distance, a curve a length."""
    rows = result["passkey"]["rows"]
    groups = {
        f"length {length:,}": [
            {"x": row["distance"], **row["score"]} for row in rows if row["length"] == length
        ]
        for length in sorted({row["length"] for row in rows})
    }
    return distance_figure(groups, result["training_length"], "Passkey by distance, generation")
