"""What the answers to longer problems say: in words, as lines and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from alibi_lm.evals.report import plots

CAVEAT = (
    "Exact answers fall with the length of the answer even where each token is nearly always "
    "right; and failing on these problems says nothing about perplexity or retrieval."
)


def verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """How far each task is mastered, and whether that is beyond the trained number of items.

    A length counts as mastered while the share of exact answers is at least the threshold there
    and at every shorter length asked.

    Returns:
        `word` (generalizes, partly, stops, not learned, cannot tell), `text`, `caveat`, and
        `tasks`: `word`, `reach` (items; 0: none) and `text` of each.
    """
    tasks = {
        task: _task(task, [cell for cell in result["cells"] if cell["task"] == task], result)
        for task in result["tasks"]
    }
    words = {own["word"] for own in tasks.values()}
    word = words.pop() if len(words) == 1 else "partly"
    text = " ".join(own["text"] for own in tasks.values())
    return {"word": word, "text": text, "caveat": CAVEAT, "tasks": tasks}


def _task(
    task: str, cells: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> dict[str, Any]:
    trained, threshold = result["trained_items"], result["threshold"]
    reach, failed = 0, None
    for cell in cells:
        if cell["rate"] < threshold:
            failed = cell
            break
        reach = cell["items"]
    inside = [cell for cell in cells if cell["items"] <= trained]
    beyond = [cell for cell in cells if cell["items"] > trained]
    fall = "" if failed is None else f"{_words(failed)} exact at {failed['items']}"
    name = task.capitalize()
    if not inside or not beyond:
        side = "within" if not inside else "beyond"
        word, text = "cannot tell", f"{name}: cannot tell, no length {side} {trained} was asked."
    elif reach < inside[-1]["items"]:
        word = "not learned"
        text = (
            f"{name} is not learned up to {trained} items, the most trained by "
            f"generalization.trained_items ({fall}), so longer problems say nothing."
        )
    elif reach <= trained:
        word = "stops"
        text = f"{name} stops at {trained} items, the most trained ({fall})."
    elif failed is None:
        word = "generalizes"
        text = (
            f"{name} generalizes from {trained} to {reach} items, the most asked "
            f"({_words(cells[-1])} exact)."
        )
    else:
        word = "partly"
        text = f"{name} generalizes from {trained} to {reach} items and stops there ({fall})."
    return {"word": word, "reach": reach, "text": text}


def _words(cell: Mapping[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['rate']:.0%} ({low:.0%} to {high:.0%})"


def lines(result: Mapping[str, Any]) -> list[str]:
    """A row a task: the share of exact answers at every length."""
    head = "".join(f"{items:>6}" for items in result["lengths"])
    found = [f"exact answers by items{head}"]
    for task in result["tasks"]:
        row = [cell for cell in result["cells"] if cell["task"] == task]
        found.append(f"{task:<22}" + "".join(f"{cell['rate']:>6.0%}" for cell in row))
        forced = "".join(f"{cell['teacher_forced']:>6.0%}" for cell in row)
        found.append(f"{'  tokens, forced':<22}{forced}")
    return found


def figure(result: Mapping[str, Any]) -> Figure:
    """Exact answers against items, a line a task with its interval, the trained range marked."""
    drawn, axes = plots.axes_of(9, 4.2)
    for index, task in enumerate(result["tasks"]):
        row = [cell for cell in result["cells"] if cell["task"] == task]
        items = [cell["items"] for cell in row]
        low, high = zip(*(cell["interval"] for cell in row), strict=True)
        color = plots.SERIES[index % len(plots.SERIES)]
        axes.fill_between(items, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(items, [cell["rate"] for cell in row], color=color, marker="o", linewidth=2,
                  label=f"{task}, exact")  # fmt: skip
        axes.plot(items, [cell["teacher_forced"] for cell in row], color=color, linewidth=1,
                  linestyle=":", label=f"{task}, tokens, teacher-forced")  # fmt: skip
    axes.axvline(result["trained_items"], color=plots.TRAINING, linestyle="--", linewidth=1.3,
                 label="most items trained")  # fmt: skip
    axes.set_xticks(result["lengths"])
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("items of the problem", color=plots.INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=plots.INK, ncols=2)
    plots.title(axes, "Exact answers by items, with 95% intervals")
    return drawn
