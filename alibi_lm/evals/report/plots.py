"""Pictures of a run's results. Figures are made without pyplot, so nothing global is touched."""

from __future__ import annotations

import io
import math
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
MAX_LABELS = 18
"""Labels of lengths that fit an axis side by side."""


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
    """Label these places of a logarithmic horizontal axis, as far as labels do not overlap."""
    places = sorted(n for n in set(lengths) if n > 0)
    gap = math.log2(places[-1] / places[0]) / MAX_LABELS if places else 0.0
    kept: list[float] = []
    for place in places:
        if not kept or math.log2(place / kept[-1]) >= gap:
            kept.append(place)
    axes.xaxis.set_major_locator(FixedLocator(kept))
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
    _limit_loss_axis(axes, steps, losses)
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


def _limit_loss_axis(axes: Axes, steps: Sequence[int], losses: Sequence[float]) -> None:
    # The first steps' high losses would flatten the part of the curve that is worth seeing.
    if len(losses) < 20:
        return
    low, high = min(losses), max(losses[len(losses) // 20 :])
    margin = 0.05 * max(high - low, 1e-3)
    axes.set_ylim(min(low, axes.dataLim.y0) - margin, high + margin)
    if axes.dataLim.y1 > high + margin:
        first = next(step for step, loss in zip(steps, losses, strict=True) if loss <= high)
        note = f"axis cut: losses before step {first:,} reach {axes.dataLim.y1:.2f}"
        axes.set_title(note, loc="right", fontsize=10, color=MUTED, pad=10)


Curve = Sequence[tuple[float, float]]
"""Points (x, y)."""


def lines_figure(
    heading: str, x_label: str, y_label: str, lines: Mapping[str, Curve], *, share: bool = False
) -> Figure:
    """A line for each label over a logarithmic axis of lengths; with `share` y is 0 to 100%."""
    figure, axes = axes_of(9, 4.4)
    for index, (name, curve) in enumerate(lines.items()):
        axes.plot(
            [x for x, _ in curve],
            [y for _, y in curve],
            color=SERIES[index % len(SERIES)],
            marker="o",
            markersize=4.5,
            linestyle="-" if index < len(SERIES) else "--",
            label=name,
        )
    axes.set_xscale("log", base=2)
    mark_lengths(axes, [x for curve in lines.values() for x, _ in curve])
    if share:
        share_axis(axes)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    title(axes, heading)
    return figure


def share_axis(axes: Axes) -> None:
    """Make the vertical axis one of 0 to 100%."""
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def perplexity_curve(
    axes: Axes, curve: Curve, training_length: int, what: str, label: str | None = None
) -> None:
    """Perplexity against `what` in tokens, each value written, the training length marked."""
    lengths = [length for length, _ in curve]
    axes.plot(lengths, [value for _, value in curve], color=BLUE, marker="o", markersize=6,
              linewidth=2, label=label)  # fmt: skip
    _label_values(axes, curve)
    mark_training_length(axes, training_length)
    axes.set_xscale("log", base=2)
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 2, lengths[0] * 2)
    mark_lengths(axes, lengths)
    axes.margins(x=0.06, y=0.18)
    axes.set_xlabel(f"{what} (tokens, log scale)", color=INK)
    axes.set_ylabel("perplexity", color=INK)
    legend_below(axes)


def _label_values(axes: Axes, curve: Curve) -> None:
    """Write each value beside its point, off the curve and off a line up from the point."""
    values = [value for _, value in curve]
    for index, (length, value) in enumerate(curve):
        before = values[index - 1] if index else value
        after = values[index + 1] if index + 1 < len(values) else value
        falls = before > value or (before == value and after < value)
        valley = before > value < after
        axes.annotate(
            f"{value:.2f}",
            (length, value),
            textcoords="offset points",
            xytext=(5 if falls else -5, -16 if valley else 7),
            ha="left" if falls else "right",
            fontsize=10,
            color=INK,
        )


def legend_below(axes: Axes) -> None:
    """A legend under the horizontal axis, where neither data nor marked lengths are."""
    axes.legend(frameon=False, fontsize=10, labelcolor=INK, loc="upper left",
                bbox_to_anchor=(0, -0.17), borderaxespad=0, ncols=3)  # fmt: skip


def mark_training_length(axes: Axes, training_length: float, what: str = "training length") -> None:
    """Draw a vertical line at the training length."""
    axes.axvline(training_length, color=TRAINING, linestyle="--", linewidth=1.3, label=what)


def heatmap(
    axes: Axes, rates: np.ndarray, rows: Sequence[str], lengths: Sequence[int], training_length: int
) -> Any:
    """Rates `[rows, lengths]` as colors and numbers, the training length between two columns.

    Returns:
        The image, for `color_bar`.
    """
    image = axes.imshow(rates, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        if not np.isnan(rate):
            color = "white" if rate < 0.65 else INK
            axes.text(
                column, row, f"{rate:.0%}", ha="center", va="center", fontsize=10, color=color
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(colors=INK, labelsize=10, length=0)
    axes.spines[:].set_visible(False)
    words = "prompt length (tokens)"
    inside = sum(length <= training_length for length in lengths)
    if 0 < inside < len(lengths):
        axes.axvline(inside - 0.5, color="white", linewidth=6)
        axes.axvline(inside - 0.5, color=TRAINING, linewidth=2.5)
        words += f"; red line: training length {training_length:,}"
    axes.set_xlabel(words, color=INK)
    return image


def color_bar(figure: Figure, image: Any, axes: Any, **settings: Any) -> None:
    """A heatmap's scale of colors, in percent."""
    bar = figure.colorbar(image, ax=axes, **settings)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    bar.ax.tick_params(colors=INK, labelsize=9)


def curve_figure(rows: Sequence[Mapping[str, Any]], training_length: int) -> Figure:
    """Perplexity of the same tokens against the length of the input (`bench long`)."""
    figure, axes = axes_of(9, 4.2)
    curve = [(row["length"], row["perplexity"]) for row in rows]
    perplexity_curve(axes, curve, training_length, "input length")
    title(axes, "Perplexity of the same tokens by input length, with pruned attention")
    return figure
