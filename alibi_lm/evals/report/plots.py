"""Pictures of a run's results. Figures are made without pyplot, so nothing global is touched."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from alibi_lm.evals.report.training_metrics import Metrics
from alibi_lm.utils.files import replacing

INK = "#1f2937"
MUTED = "#6b7280"
GRID = "#e5e7eb"
BLUE = "#1d4ed8"
SERIES = ("#1d4ed8", "#c2410c", "#047857", "#7e22ce", "#b45309", "#0e7490")
TRAINING = "#b91c1c"
DPI = 144


def png(figure: Figure) -> bytes:
    """A figure as PNG bytes."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Atomically write a figure as a PNG file."""
    with replacing(path) as temporary:
        temporary.write_bytes(png(figure))


def axes_of(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one pair of axes, in this project's style; inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=10)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def mark_lengths(axes: Axes, lengths: Sequence[float]) -> None:
    """Label exactly these places of the horizontal axis."""
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def title(axes: Axes, text: str) -> None:
    """Head a pair of axes."""
    axes.set_title(text, loc="left", fontsize=12, color=INK, fontweight="bold", pad=10)


def loss_figure(metrics: Metrics) -> Figure:
    """Training loss, and validation loss by length where there is any, against steps."""
    figure, axes = axes_of(9, 4.2)
    steps = [point.step for point in metrics.points]
    losses = [point.loss for point in metrics.points]
    smooth = _smooth(losses)
    if smooth is None:
        axes.plot(steps, losses, color=BLUE, linewidth=1.8, label="training")
    else:
        axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smooth, color=BLUE, linewidth=1.8, label="training (smoothed)")
    for index, length in enumerate(metrics.validation_lengths):
        curve = metrics.validation(length)
        axes.plot(
            [step for step, _ in curve],
            [loss for _, loss in curve],
            color=SERIES[(index + 1) % len(SERIES)],
            marker="o",
            markersize=4.5,
            linewidth=1.4,
            label=f"validation, length {length:,}",
        )
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss (nats a token)", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _limit_loss_axis(axes, losses)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    title(axes, "Loss")
    return figure


def _smooth(losses: Sequence[float]) -> list[float] | None:
    """Centered running mean; None where there are too few points for one to help."""
    if len(losses) < 40:
        return None
    half = max(1, len(losses) // 50)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    edges = [(max(0, i - half), min(len(losses), i + half + 1)) for i in range(len(losses))]
    return [float((sums[b] - sums[a]) / (b - a)) for a, b in edges]


def _limit_loss_axis(axes: Axes, losses: Sequence[float]) -> None:
    # The first steps' high losses would flatten the part of the curve that is worth seeing.
    if len(losses) >= 20:
        low, high = min(losses), max(losses[len(losses) // 20 :])
        margin = 0.05 * max(high - low, 1e-3)
        axes.set_ylim(min(low, axes.dataLim.y0) - margin, high + margin)


def perplexity_figure(result: Mapping[str, Any]) -> Figure:
    """Perplexity against window length, the training length marked.

    The band is the interval of the change against the training length. The interval of the
    perplexity itself is mostly the difference between documents, which all lengths share, and
    would hide the curve.
    """
    figure, axes = axes_of(9, 4.2)
    rows = result["rows"]
    lengths = [row["length"] for row in rows]
    _band(axes, rows)
    values = [row["perplexity"] for row in rows]
    axes.plot(lengths, values, color=BLUE, marker="o", markersize=6, linewidth=2,
              label="perplexity")  # fmt: skip
    for length, value in zip(lengths, values, strict=True):
        axes.annotate(
            f"{value:.2f}",
            (length, value),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            fontsize=10,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.7},
        )
    _perplexity_axes(axes, lengths, result["training_length"], "window length")
    title(axes, "Perplexity by window length, same tokens at every length")
    return figure


def _perplexity_axes(axes: Axes, lengths: Sequence[int], training_length: int, what: str) -> None:
    """Perplexity against `what` in tokens, the training length marked."""
    axes.axvline(training_length, color=TRAINING, linestyle="--", linewidth=1.3,
                 label="training length")  # fmt: skip
    axes.set_xscale("log", base=2)
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)
    mark_lengths(axes, lengths)
    axes.margins(x=0.06, y=0.18)
    axes.set_xlabel(f"{what} (tokens, log scale)", color=INK)
    axes.set_ylabel("perplexity", color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)


def _band(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    if not all(row["ratio_interval"] for row in rows):
        return
    reference = next(row["perplexity"] for row in rows if row["ratio"] == 1)
    low, high = zip(*(row["ratio_interval"] for row in rows), strict=True)
    axes.fill_between(
        [row["length"] for row in rows],
        [reference * ratio for ratio in low],
        [reference * ratio for ratio in high],
        color=BLUE,
        alpha=0.15,
        linewidth=0,
        label="95% interval of the change against the training length",
    )


def needle_figure(result: Mapping[str, Any]) -> Figure:
    """Depth x length heatmaps of ranking and of generation, side by side."""
    lengths, depths = result["lengths"], result["depths"]
    width = 3.4 + 1.1 * len(lengths)
    height = 2.2 + 0.5 * len(depths)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    rates = {(cell["length"], cell["depth"]): cell for cell in result["cells"]}
    panels = (
        (left, "ranking", f"Closed-set ranking (chance {result['chance']:.0%})"),
        (right, "generation", "Greedy generation, exact (chance 0%)"),
    )
    images = []
    for axes, score, heading in panels:
        grid = np.array([[rates[n, d][score]["rate"] for n in lengths] for d in depths])
        images.append(axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto"))
        annotate(axes, grid)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.tick_params(colors=INK, labelsize=10, length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("prompt length (tokens)", color=INK)
        title(axes, heading)
        mark_training_length(axes, lengths, result["training_length"])
    left.set_ylabel("needle's depth", color=INK)
    bar = figure.colorbar(images[0], ax=[left, right], fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    bar.ax.tick_params(colors=INK, labelsize=9)
    return figure


def annotate(axes: Axes, grid: np.ndarray) -> None:
    """Write every rate of a heatmap into its cell; not a number stays empty."""
    for (row, column), rate in np.ndenumerate(grid):
        if np.isnan(rate):
            continue
        color = "white" if rate < 0.65 else INK
        axes.text(column, row, f"{rate:.0%}", ha="center", va="center", fontsize=10, color=color)


def mark_training_length(axes: Axes, lengths: Sequence[int], training_length: int) -> None:
    """Draw the training length between a heatmap's columns."""
    inside = sum(length <= training_length for length in lengths)
    if 0 < inside < len(lengths):
        axes.axvline(inside - 0.5, color="white", linewidth=6)
        axes.axvline(inside - 0.5, color=TRAINING, linewidth=2.5)
        axes.set_xlabel(f"prompt length (tokens); red line: training length {training_length:,}",
                        color=INK)  # fmt: skip


def attention_span_figure(result: Mapping[str, Any]) -> Figure:
    """Certified and true reach of every head, the training length marked."""
    figure, axes = axes_of(9, 4.2)
    slopes = result["slopes"]
    kinds = (("certified_max", BLUE, "certified", -0.15), ("true_max", SERIES[1], "true", 0.15))
    for key, color, label, shift in kinds:
        axes.scatter(
            [row["head"] + shift for row in result["rows"]],
            [max(1, row[key]) for row in result["rows"]],
            color=color,
            s=26,
            alpha=0.8,
            linewidths=0,
            label=f"{label} reach (one point a layer)",
        )
    axes.axhline(result["training_length"], color=TRAINING, linestyle="--", linewidth=1.3,
                 label="training length")  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    names = [f"{head}\n{slope:.3g}" for head, slope in enumerate(slopes)]
    if len(slopes) <= 16:
        axes.set_xticks(range(len(slopes)), names)
    axes.set_xlabel("head, and its slope", color=INK)
    axes.set_ylabel("reach (tokens, log scale)", color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    title(axes, f"How far heads read, but for {result['pruning_tolerance']:g} of their probability")
    return figure


def curve_figure(result: Mapping[str, Any]) -> Figure:
    """Perplexity of the same tokens against the length of the input, the training length marked."""
    figure, axes = axes_of(9, 4.2)
    lengths = [row["length"] for row in result["curve"]]
    values = [row["perplexity"] for row in result["curve"]]
    axes.plot(lengths, values, color=BLUE, marker="o", markersize=6, linewidth=2)
    for length, value in zip(lengths, values, strict=True):
        axes.annotate(f"{value:.2f}", (length, value), textcoords="offset points", xytext=(0, 9),
                      ha="center", fontsize=10, color=INK)  # fmt: skip
    _perplexity_axes(axes, lengths, result["training_length"], "input length")
    title(axes, "Perplexity of the same tokens by input length, by horizons")
    return figure
