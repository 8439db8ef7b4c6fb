"""The result of the generalization eval: words, lines and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from alibi_lm.evals.base import Json, Result, Verdict
from alibi_lm.evals.report import plots
from alibi_lm.evals.statistics import Share

CAVEAT = (
    "Exact answers fall with the length of the answer even where each token is nearly always "
    "right; and failing on these problems says nothing about perplexity or retrieval."
)


@dataclass(kw_only=True)
class GeneralizationCell(Share):
    """Exact answers to the problems of one task and number of items."""

    task: str
    items: int
    trials: int
    teacher_forced: float
    """Share of the answers' tokens that are the greedy choice after the right ones."""
    loss: float
    """Nats a token of the answers."""


@dataclass
class TaskVerdict:
    """How far one task is mastered."""

    word: str
    longest_solved: int
    """Items; 0: none."""
    text: str


@dataclass
class GeneralizationVerdict(Verdict):
    """All tasks together, and each."""

    tasks: dict[str, TaskVerdict]


@dataclass(kw_only=True)
class GeneralizationResult(Result):
    """Answers to problems with more items than were trained."""

    protocol: str
    tasks: list[str]
    lengths: list[int]
    trained_items: int
    threshold: float
    num_trials: int
    seed: int
    examples: dict[str, str]
    precision: str
    model: Json
    seconds: float
    cells: list[GeneralizationCell]
    verdict: GeneralizationVerdict


def verdict(
    cells: Sequence[GeneralizationCell], trained_items: int, threshold: float
) -> GeneralizationVerdict:
    """How far each task is mastered, and whether that is beyond the trained number of items.

    A length counts as mastered while the share of exact answers is at least the threshold there
    and at every shorter length asked.

    Returns:
        With the word generalizes, partly, stops, not learned or cannot tell.
    """
    tasks = {
        task: _task(task, [cell for cell in cells if cell.task == task], trained_items, threshold)
        for task in dict.fromkeys(cell.task for cell in cells)
    }
    words = {each.word for each in tasks.values()}
    word = words.pop() if len(words) == 1 else "partly"
    text = " ".join(each.text for each in tasks.values())
    return GeneralizationVerdict(word, text, CAVEAT, tasks)


def _task(
    task: str, cells: Sequence[GeneralizationCell], trained: int, threshold: float
) -> TaskVerdict:
    solved, failed = 0, None
    for cell in cells:
        if cell.rate < threshold:
            failed = cell
            break
        solved = cell.items
    inside = [cell for cell in cells if cell.items <= trained]
    beyond = [cell for cell in cells if cell.items > trained]
    fall = "" if failed is None else f"{failed} exact at {failed.items}"
    name = task.capitalize()
    if not inside or not beyond:
        side = "within" if not inside else "beyond"
        word, text = "cannot tell", f"{name}: cannot tell, no length {side} {trained} was asked."
    elif solved < inside[-1].items:
        word = "not learned"
        text = (
            f"{name} is not learned up to {trained} items, the most trained by "
            f"generalization.trained_items ({fall}), so longer problems say nothing."
        )
    elif solved <= trained:
        word = "stops"
        text = f"{name} stops at {trained} items, the most trained ({fall})."
    elif failed is None:
        word = "generalizes"
        text = (
            f"{name} generalizes from {trained} to {solved} items, the most asked "
            f"({cells[-1]} exact)."
        )
    else:
        word = "partly"
        text = f"{name} generalizes from {trained} to {solved} items and stops there ({fall})."
    return TaskVerdict(word, solved, text)


def table(result: GeneralizationResult) -> list[str]:
    """Two rows a task: the share of exact answers, and of tokens, at every length."""
    lines = ["exact answers by items" + "".join(f"{items:>6}" for items in result.lengths)]
    for task in result.tasks:
        row = [cell for cell in result.cells if cell.task == task]
        lines.append(f"{task:<22}" + "".join(f"{cell.rate:>6.0%}" for cell in row))
        forced = "".join(f"{cell.teacher_forced:>6.0%}" for cell in row)
        lines.append(f"{'  tokens, forced':<22}{forced}")
    return lines


def figure(result: GeneralizationResult) -> Figure:
    """Exact answers against items, a line a task with its interval, the trained range marked."""
    drawn, axes = plots.axes_of(9, 4.2)
    for index, task in enumerate(result.tasks):
        row = [cell for cell in result.cells if cell.task == task]
        items = [cell.items for cell in row]
        low, high = zip(*(cell.interval for cell in row), strict=True)
        color = plots.SERIES[index % len(plots.SERIES)]
        axes.fill_between(items, low, high, color=color, alpha=0.15, linewidth=0)
        rates, forced = [cell.rate for cell in row], [cell.teacher_forced for cell in row]
        axes.plot(items, rates, color=color, marker="o", linewidth=2, label=f"{task}, exact")
        label = f"{task}, tokens, teacher-forced"
        axes.plot(items, forced, color=color, linewidth=1, linestyle=":", label=label)
    plots.mark_training_length(axes, result.trained_items, "most items trained")
    axes.set_xticks(result.lengths)
    plots.share_axis(axes)
    axes.set_xlabel("items of the problem", color=plots.INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=plots.INK, ncols=2)
    plots.title(axes, "Exact answers by items, with 95% intervals")
    return drawn
