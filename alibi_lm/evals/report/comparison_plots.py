"""Plots of several models: one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from alibi_lm.evals.report.plots import INK, SERIES, axes_of, mark_lengths, title

Found = Mapping[str, dict[str, Any]]
Line = tuple[Sequence[float], Sequence[float]]


def figures(found: Mapping[str, Found]) -> dict[str, Figure]:
    """Every plot that the results of at least one model have data for."""
    made = {}
    perplexity = found["perplexity"]
    if perplexity:
        bits = all(row["bits_per_byte"] is not None
                   for result in perplexity.values() for row in result["rows"])  # fmt: skip
        key = "bits_per_byte" if bits else "perplexity"
        made["perplexity"] = lines_figure(
            "Same text at every length", "window length (tokens)", key.replace("_", " "),
            {name: ([row["length"] for row in result["rows"]],
                    [row[key] for row in result["rows"]])
             for name, result in perplexity.items()},
        )  # fmt: skip
        made["position"] = lines_figure(
            "Loss by tokens of context", "tokens of context", "loss (nats a token)",
            {name: ([row["last"] for row in result["by_position"]["rows"]],
                    [row["loss"] for row in result["by_position"]["rows"]])
             for name, result in perplexity.items()},
        )  # fmt: skip
    if found["needle"]:
        made["needle"] = lines_figure(
            "Needles found by ranking", "prompt length (tokens)", "share found",
            {name: ([row["length"] for row in result["by_length"]],
                    [row["ranking"]["rate"] for row in result["by_length"]])
             for name, result in found["needle"].items()},
        )  # fmt: skip
    return made


def lines_figure(heading: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> Figure:
    """Lines over a logarithmic axis of lengths."""
    figure, axes = axes_of(9, 4.4)
    for index, (name, (x, y)) in enumerate(lines.items()):
        axes.plot(x, y, color=SERIES[index % len(SERIES)], marker="o", markersize=4.5,
                  linestyle="-" if index < len(SERIES) else "--", label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    mark_lengths(axes, sorted({n for x, _ in lines.values() for n in x}))
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)
    title(axes, heading)
    return figure
