"""What retrieval results say, in words."""

from __future__ import annotations

from collections.abc import Sequence

from alibi_lm.evals.base import Verdict
from alibi_lm.evals.retrieval.result import Scores, TaskCell, TaskVerdict
from alibi_lm.evals.statistics import CONFIDENCE, significantly_greater, wilson

RETRIEVAL_CAVEAT = (
    "The tasks are synthetic and narrow. Prompts in RULER's words give instructions that a base "
    "model may never have seen the like of; a failure within the training length is then one of "
    "the task, not of the context. Lists of words (cwe, fwe) can be answered from a part of them."
)


class _RetrievalTest:
    """Tests whether groups of a task's prompts show retrieval."""

    def __init__(self, cells: Sequence[TaskCell], chance: float | None) -> None:
        self._chance = chance
        # The closed-book rate is that of the task: controls of all lengths are pooled.
        controls = [cell.control for cell in cells]
        self._trials = sum(control.trials for control in controls)
        self._score = sum(control.score.correct for control in controls)
        self._whole = sum(control.whole.correct for control in controls)
        groups = sum(2 + (cell.far is not None) for cell in cells)
        self._confidence = 1 - (1 - CONFIDENCE) / (2 * groups)

    def retrieves(self, group: Scores | None, *, whole: bool = False) -> bool:
        """Whether ranking is above chance, or generation above that of the controls.

        With `whole`, answers of which only a part was found do not count.
        """
        if group is None:
            return False
        if group.ranking is not None and self._chance is not None:
            low, _ = wilson(group.ranking.correct, group.trials, self._confidence)
            if low > self._chance:
                return True
        kinds = [(group.whole, self._whole), (group.score, self._score)]
        return any(
            significantly_greater(
                (share.correct, group.trials), (control, self._trials), self._confidence
            )
            for share, control in kinds[: 1 if whole else 2]
        )


def task_verdict(
    task: str, cells: Sequence[TaskCell], chance: float | None, training_length: int
) -> TaskVerdict:
    """What one task says about retrieval within and beyond the training length.

    A fact counts as beyond when it lies more than the training length before the prompt's end. Only
    whole answers count there: a part of one may come from nearer facts.

    Args:
        cells: the task's, by ascending length.

    Returns:
        With the word does not retrieve, holds, fades, fails beyond or cannot tell.
    """
    word, text = _word_and_text(cells, _RetrievalTest(cells, chance), training_length)
    return TaskVerdict(task=task, word=word, text=f"{task}: {text}")


def _word_and_text(
    cells: Sequence[TaskCell], test: _RetrievalTest, training_length: int
) -> tuple[str, str]:
    inside = [cell for cell in cells if cell.length <= training_length]
    if not inside:
        return "cannot tell", "no prompt was within the training length."
    within = [cell for cell in inside if test.retrieves(cell)]
    best = max(inside, key=_rate)
    if not within:
        return "does not retrieve", (
            f"does not retrieve at all up to the training length of {training_length:,} "
            f"(best {_words(best)} at {best.length:,})."
        )
    known = f"retrieves within {training_length:,} ({_words(best)} at {best.length:,})"
    far = [cell for cell in cells if cell.far is not None]
    if not far:
        return "cannot tell", f"{known}; no needed fact lay farther back than that."
    if not any(test.retrieves(cell, whole=True) for cell in within):
        return "cannot tell", f"{known}, but only parts of answers; facts farther back count whole."
    return _beyond(far, best, test, training_length, known)


def _beyond(
    far: Sequence[TaskCell],
    best: TaskCell,
    test: _RetrievalTest,
    training_length: int,
    known: str,
) -> tuple[str, str]:
    kept = [cell.length for cell in far if test.retrieves(cell.far, whole=True)]
    lost = [cell.length for cell in far if cell.length not in kept]
    last = far[-1]
    assert last.far is not None
    numbers = f"at {last.length:,}: {_words(last.far)}"
    if not kept:
        near = [cell for cell in far if cell.near is not None]
        rest = ""
        if near:
            rest = "; nor are nearer facts in such prompts, so longer input itself breaks it"
            if found_near := [cell.length for cell in near if test.retrieves(cell.near)]:
                rest = f"; nearer facts are still found in prompts of {lengths_words(found_near)}"
        return "fails beyond", (
            f"{known}, fails beyond: facts more than {training_length:,} tokens back are not found "
            f"at any length ({numbers}){rest}."
        )
    if lost:
        return "fades", (
            f"{known}; facts farther back are found in prompts of {lengths_words(kept)} but not "
            f"of {lengths_words(lost)} ({numbers})."
        )
    if last.far.whole.interval[1] < best.whole.interval[0]:
        return "fades", f"{known}; facts farther back are found less often ({numbers})."
    return "holds", f"{known}, and up to {last.length:,} ({numbers} for facts farther back)."


def _rate(cell: TaskCell) -> float:
    return max(cell.score.rate, cell.ranking.rate if cell.ranking else 0.0)


def _words(group: Scores) -> str:
    text = f"{group.score} by generation"
    return text if group.ranking is None else f"{text}, {group.ranking} by ranking"


def lengths_words(lengths: Sequence[int]) -> str:
    """Lengths, for example `1,024, 2,048`."""
    return ", ".join(f"{length:,}" for length in lengths)


def retrieval_verdict(verdicts: Sequence[TaskVerdict], training_length: int) -> Verdict:
    """All tasks together.

    Returns:
        With the word that the tasks which retrieve within the training length agree on, else fades.
    """
    by_word: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_word.setdefault(verdict.word, []).append(verdict.task)
    parts = [
        f"{phrase.format(length=f'{training_length:,}')}: {', '.join(by_word[word])}"
        for word, phrase in _PHRASES
        if word in by_word
    ]
    words: list[str] = [word for word in ("holds", "fades", "fails beyond") if word in by_word]
    word = "fades"
    if len(words) == 1:
        word = words[0]
    elif not words:
        word = "does not retrieve" if "does not retrieve" in by_word else "cannot tell"
    text = "; ".join(parts)
    return Verdict(word, f"{text[0].upper()}{text[1:]}.", RETRIEVAL_CAVEAT)


_PHRASES = (
    ("holds", "holds beyond the training length of {length}"),
    ("fades", "fades beyond the training length of {length}"),
    ("fails beyond", "retrieves up to {length}, fails beyond {length}"),
    ("does not retrieve", "does not retrieve at all up to {length}"),
    ("cannot tell", "cannot tell"),
)
