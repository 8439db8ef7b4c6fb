"""Results as lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alibi_lm.evals.models.scorer import ANSWERS_DENSE_UP_TO
from alibi_lm.evals.retrieval.table import table_lines
from alibi_lm.evals.verdicts import score_words
from alibi_lm.model.inference.long_scoring import DENSE_UP_TO


def perplexity_lines(result: Mapping[str, Any]) -> list[str]:
    """Perplexity by length, protocol by protocol, and the verdict of the null model."""
    lines = ["non-overlapping windows", *_length_lines(result)]
    if sliding := result.get("sliding"):
        lines += [f"sliding windows, stride {sliding['stride']:,}", *_length_lines(sliding)]
    if fixed := result.get("fixed_target"):
        title = f"fixed targets, the last {fixed['num_targets']:,} tokens of each document"
        lines += [title, *_length_lines(fixed)]
    lines += _epsilon_lines(result, DENSE_UP_TO)
    if null := result.get("truncated_context"):
        lines.append(null["verdict"]["text"])
    return lines


def _epsilon_lines(result: Mapping[str, Any], dense_up_to: int) -> list[str]:
    """What long inputs were read without, if anything."""
    epsilon = result["model"].get("pruning_tolerance")
    if not epsilon or max(result["lengths"]) <= dense_up_to:
        return []
    return [f"above {dense_up_to:,} tokens each head leaves out at most {epsilon:g} of a row"]


def _length_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{'window':>10}  {'x training':>10}  {'perplexity':>10}  {'95% interval':>17}  ratio"]
    for row in result["rows"]:
        interval = row["perplexity_interval"]
        shown = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "too few documents"
        ratio = f"{row['ratio']:.4f}" if row["ratio"] is not None else "-"
        lines.append(
            f"{row['length']:>10,}  {row['multiple']:>10g}  {row['perplexity']:>10.3f}  "
            f"{shown:>17}  {ratio}"
        )
    return lines


def needle_lines(result: Mapping[str, Any]) -> list[str]:
    """The best and the worst cell, generation and the closed-book rate."""

    def words(cell: Mapping[str, Any]) -> str:
        place = f"length {cell['length']:,}, depth {cell['depth']:.0%}"
        return f"{score_words(cell['ranking'])} at {place}"

    best = max(result["cells"], key=lambda cell: cell["ranking"]["rate"])
    worst = min(result["cells"], key=lambda cell: cell["ranking"]["rate"])
    controls = [row["control"]["ranking"] for row in result["by_length"]]
    blind = sum(control["rate"] for control in controls) / len(controls)
    generated = max(result["by_length"], key=lambda row: row["generation"]["rate"])
    return [
        f"needle, ranking among {result['num_candidates']} (chance {result['chance']:.0%}; "
        f"control without a needle: {blind:.0%}):",
        f"  best cell   {words(best)}",
        f"  worst cell  {words(worst)}",
        f"  generation, best length {generated['length']:,}: "
        f"{score_words(generated['generation'])}",
        *(
            f"  more than {row['above']:,} and up to {row['up_to']:,} tokens back: "
            f"{score_words(row['ranking'])} by ranking, {score_words(row['generation'])} by "
            "generation"
            for row in result.get("by_distance", [])
        ),
        *_epsilon_lines(result, ANSWERS_DENSE_UP_TO),
    ]


def retrieval_lines(result: Mapping[str, Any]) -> list[str]:
    """Base scores, RULER's table, the passkey's reach and what each task says."""
    lines = [f"{'task':>16}  {'shortest':>8}  generation, without the facts; ranking (chance)"]
    chances = {task["name"]: task["chance"] for task in result["tasks"]}
    for cell in result["base"]:
        ranking = "-"
        if cell["ranking"] is not None:
            ranking = f"{score_words(cell['ranking'])} ({chances[cell['task']]:.0%})"
        lines.append(
            f"{cell['task']:>16}  {cell['length']:>8,}  {score_words(cell['score'])}, "
            f"{score_words(cell['control']['score'])}; {ranking}"
        )
    if result["table"] is not None:
        lines += ["RULER, scores in percent", *table_lines(result["table"])]
        changed = [t["name"] for t in result["tasks"] if t["ruler"] and not t["published"]]
        if changed:
            lines.append(f"not of RULER's own sizes or texts: {', '.join(changed)}")
    for row in result["passkey"]["k_max"] if result["passkey"] else []:
        reach = "none" if row["k_max"] is None else f"{row['k_max']:,} tokens"
        lines.append(f"passkey, length {row['length']:,}: k_max {reach}")
    lines += _epsilon_lines(result, ANSWERS_DENSE_UP_TO)
    return lines + [verdict["text"] for verdict in result["verdicts"]]


def attention_span_lines(result: Mapping[str, Any]) -> list[str]:
    """Slope, certified and true reach by head: the largest over layers, then each layer's."""
    lines = [
        f"{'head':>4}  {'slope':>8}  {'certified':>10}  {'true':>10}  by layer: certified / true"
    ]
    for head, slope in enumerate(result["slopes"]):
        rows = [row for row in result["rows"] if row["head"] == head]
        parts = [f"{row['certified_max']:,} / {row['true_max']:,}" for row in rows]
        lines.append(
            f"{head:>4}  {slope:>8.5f}  {max(row['certified_max'] for row in rows):>10,}  "
            f"{max(row['true_max'] for row in rows):>10,}  {', '.join(parts)}"
        )
    composed = result["composed"]
    lines.append(
        f"through all layers: certified {composed['certified']:,}, true {composed['true']:,} tokens"
    )
    return lines
