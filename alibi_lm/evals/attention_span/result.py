"""The result of the attention span eval: words, lines and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from alibi_lm.evals.base import Result, Verdict
from alibi_lm.evals.report import plots


@dataclass(kw_only=True)
class HeadRow:
    """Attention spans of one head, in tokens."""

    layer: int
    head: int
    slope: float
    certified_median: int
    certified_max: int
    true_median: int
    true_max: int
    largest_score: float
    prior: int
    """Bound from the largest norms alone."""


@dataclass(kw_only=True)
class AttentionSpanResult(Result):
    """How far each head reads."""

    protocol: str
    num_tokens: int
    num_queries: int
    pruning_tolerance: float
    precision: str
    loss: float
    seconds: float
    slopes: list[float]
    rows: list[HeadRow]
    composed: dict[str, int]
    """Certified and true span through all layers: the sum of each layer's longest."""


def composed(rows: list[HeadRow]) -> dict[str, int]:
    """Sum over layers of the longest span of each, certified and true."""
    certified: dict[int, int] = {}
    true: dict[int, int] = {}
    for row in rows:
        certified[row.layer] = max(certified.get(row.layer, 0), row.certified_max)
        true[row.layer] = max(true.get(row.layer, 0), row.true_max)
    return {"certified": sum(certified.values()), "true": sum(true.values())}


def verdict(
    rows: list[HeadRow], through_layers: Mapping[str, int], num_tokens: int, tolerance: float
) -> Verdict:
    """What is proven, in a sentence; the word is bounded or not bounded."""
    longest = max(rows, key=lambda row: row.certified_max)
    half = num_tokens // 2
    if longest.certified_max >= half:
        return Verdict(
            "not bounded",
            f"No attention span below {half:,} tokens, half of this text, could be certified for "
            f"head {longest.head} of layer {longest.layer}, so its span is unknown.",
            "A longer text (attention_span.num_tokens) may be enough to certify one.",
        )
    return Verdict(
        "bounded",
        f"No head gives {tolerance:g} of its probability to keys more than "
        f"{longest.certified_max:,} tokens back. Through all layers the output at a token depends "
        f"on the last {through_layers['certified']:,} tokens, apart from {tolerance:g} per layer.",
        "Certified for the second half of this text; other text may give longer spans. "
        "Scoring and decoding certify spans anew for every input.",
    )


def table(result: AttentionSpanResult) -> list[str]:
    """Slope, certified and true span by head: the largest over layers, then each layer's."""
    lines = [
        f"{'head':>4}  {'slope':>8}  {'certified':>10}  {'true':>10}  by layer: certified / true"
    ]
    for head, slope in enumerate(result.slopes):
        rows = [row for row in result.rows if row.head == head]
        parts = [f"{row.certified_max:,} / {row.true_max:,}" for row in rows]
        lines.append(
            f"{head:>4}  {slope:>8.5f}  {max(row.certified_max for row in rows):>10,}  "
            f"{max(row.true_max for row in rows):>10,}  {', '.join(parts)}"
        )
    certified, true = result.composed["certified"], result.composed["true"]
    return [*lines, f"through all layers: certified {certified:,}, true {true:,} tokens"]


def figure(result: AttentionSpanResult) -> Figure:
    """Certified and true span of every head, the training length marked."""
    drawn, axes = plots.axes_of(9, 4.2)
    heads = [row.head for row in result.rows]
    spans = {
        "certified": ([row.certified_max for row in result.rows], plots.BLUE, -0.15),
        "true": ([row.true_max for row in result.rows], plots.SERIES[1], 0.15),
    }
    for label, (values, color, shift) in spans.items():
        axes.scatter(
            [head + shift for head in heads],
            [max(1, value) for value in values],
            color=color,
            s=26,
            alpha=0.8,
            linewidths=0,
            label=f"{label} span (one point a layer)",
        )
    axes.axhline(
        result.training_length,
        color=plots.TRAINING,
        linestyle="--",
        linewidth=1.3,
        label="training length",
    )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if len(result.slopes) <= 16:
        names = [f"{head}\n{slope:.3g}" for head, slope in enumerate(result.slopes)]
        axes.set_xticks(range(len(result.slopes)), names)
    axes.set_xlabel("head, and its slope", color=plots.INK)
    axes.set_ylabel("attention span (tokens, log scale)", color=plots.INK)
    axes.legend(frameon=False, fontsize=10, labelcolor=plots.INK)
    tolerance = result.pruning_tolerance
    plots.title(axes, f"How far heads read, apart from {tolerance:g} of their probability")
    return drawn
