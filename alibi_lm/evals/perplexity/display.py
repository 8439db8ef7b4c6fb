"""Perplexity results as lines, pictures and columns of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alibi_lm.evals.base import Cell, Comparison
from alibi_lm.evals.perplexity.result import LengthRow, PerplexityResult
from alibi_lm.evals.report import plots
from alibi_lm.evals.report.plots import BLUE
from alibi_lm.model.inference.long_scoring import DENSE_UP_TO


def table(result: PerplexityResult) -> list[str]:
    """Perplexity by length, protocol by protocol, and the truncated-context verdict."""
    lines = ["non-overlapping windows", *_length_lines(result.rows)]
    if sliding := result.sliding:
        lines += [f"sliding windows, stride {sliding.stride:,}", *_length_lines(sliding.rows)]
    if fixed := result.fixed_target:
        title = f"fixed targets, the last {fixed.num_targets:,} tokens of each document"
        lines += [title, *_length_lines(fixed.rows)]
    lines += tolerance_lines(result.model, result.lengths, DENSE_UP_TO)
    if result.truncated_context:
        lines.append(result.truncated_context.verdict.text)
    return lines


def tolerance_lines(
    model: Mapping[str, object], lengths: Sequence[int], dense_up_to: int
) -> list[str]:
    """How much attention probability long inputs may skip, if any."""
    tolerance = model.get("pruning_tolerance")
    if not tolerance or max(lengths) <= dense_up_to:
        return []
    return [
        f"above {dense_up_to:,} tokens each head skips at most {tolerance:g} of its probability"
    ]


def _length_lines(rows: Sequence[LengthRow]) -> list[str]:
    lines = [f"{'window':>10}  {'x training':>10}  {'perplexity':>10}  {'95% interval':>17}  ratio"]
    for row in rows:
        interval = row.perplexity_interval
        shown = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "too few documents"
        ratio = f"{row.ratio:.4f}" if row.ratio is not None else "-"
        lines.append(
            f"{row.length:>10,}  {row.multiple:>10g}  {row.perplexity:>10.3f}  {shown:>17}  {ratio}"
        )
    return lines


def figure(result: PerplexityResult) -> Figure:
    """Perplexity against window length, the training length marked.

    The band is the interval of the change against the training length. The interval of the
    perplexity itself is mostly the difference between documents, which all lengths share, and
    would hide the curve.
    """
    drawn, axes = plots.axes_of(9, 4.2)
    _band(axes, result.rows)
    curve = [(row.length, row.perplexity) for row in result.rows]
    plots.perplexity_curve(axes, curve, result.training_length, "window length", "perplexity")
    plots.title(axes, "Perplexity by window length, same tokens at every length")
    return drawn


def _band(axes: Axes, rows: Sequence[LengthRow]) -> None:
    intervals = [row.ratio_interval for row in rows if row.ratio_interval]
    if len(intervals) < len(rows):
        return
    reference = next(row.perplexity for row in rows if row.ratio == 1)
    axes.fill_between(
        [row.length for row in rows],
        [reference * low for low, _ in intervals],
        [reference * high for _, high in intervals],
        color=BLUE,
        alpha=0.15,
        linewidth=0,
        label="95% interval of the change against the training length",
    )


def compare(results: Mapping[str, PerplexityResult]) -> Comparison:
    """Perplexity and bits per byte of each model at each length."""
    lengths = sorted({row.length for result in results.values() for row in result.rows})
    rows = []
    for name, result in results.items():
        by_length = {row.length: row for row in result.rows}
        baseline = result.truncated_context
        cells = [_cell(by_length.get(n), n == result.training_length) for n in lengths]
        rows.append([Cell(name), *cells, Cell(baseline.verdict.word if baseline else "–")])
    return Comparison(
        figures=_figures(results),
        columns=["model", *(f"{n:,}" for n in lengths), "uses context beyond its training length"],
        rows=rows,
        note="The training length of each model is marked. Perplexities compare models of one "
        "tokenizer; bits per byte compare all.",
    )


def _cell(row: LengthRow | None, marked: bool) -> Cell:
    if row is None:
        return Cell("–")
    bits = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f} bits/byte"
    return Cell(f"{row.perplexity:.3f}", bits, marked)


def _figures(results: Mapping[str, PerplexityResult]) -> dict[str, Figure]:
    rows = {name: result.rows for name, result in results.items()}
    in_bits = all(row.bits_per_byte is not None for some in rows.values() for row in some)
    by_length = {
        name: [(row.length, row.bits_per_byte or 0.0 if in_bits else row.perplexity)
               for row in some]
        for name, some in rows.items()
    }  # fmt: skip
    # The last bin of a window is its very end alone, a few targets: a cliff that means nothing.
    by_position = {
        name: [(row.last, row.loss) for row in result.by_position.rows
               if row.last == 2 * row.first - 1]
        for name, result in results.items()
    }  # fmt: skip
    unit = "bits per byte" if in_bits else "perplexity"
    return {
        "perplexity": plots.lines_figure(
            "Same text at every length", "window length (tokens)", unit, by_length
        ),
        "position": plots.lines_figure(
            "Loss by tokens of context", "tokens of context", "loss (nats a token)", by_position
        ),
    }
