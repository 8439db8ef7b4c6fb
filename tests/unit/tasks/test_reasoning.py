"""Problems of copying, addition and sorting, and documents of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from alibi_lm.tasks.reasoning import TASKS, ReasoningGenerator, question
from alibi_lm.utils.errors import DataError


def characters(text: str) -> list[int]:
    return list(text.encode())


def solve(line: str) -> tuple[str, int, bool]:
    """Task, number of items, and whether the answer is right, by another way than the maker's."""
    asked, answer = line.split("=")
    task, rest = asked.split(":")
    if task == "add":
        terms = rest.strip().split("+")
        assert len(terms[0]) == len(terms[1])
        assert all(term[-1] != "0" for term in terms)
        carry, digits = 0, ""
        for a, b in zip(*terms, strict=True):
            carry, digit = divmod(int(a) + int(b) + carry, 10)
            digits += str(digit)
        return task, len(terms[0]), answer == digits + (str(carry) if carry else "")
    items = rest.split()
    if task == "copy":
        return task, len(items), answer.split() == items
    counts = Counter(items)
    expected = [letter for letter in "abcdefghijklmnopqrstuvwxyz" for _ in range(counts[letter])]
    return task, len(items), answer.split() == expected


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_for_every_length(task: str) -> None:
    for length in (1, 2, 5, 20, 40):
        for seed in range(40):
            asked = question(task, length, np.random.default_rng(seed))
            name, items, right = solve(asked.prompt + asked.answer)
            assert (name, items, right) == (task[:3] if task == "addition" else task, length, True)
            assert asked.prompt.endswith("=")


def test_documents_are_exact_deterministic_and_of_all_lengths() -> None:
    maker = ReasoningGenerator(TASKS, (1, 20), 100, 0, characters)
    first: Counter[int] = Counter()
    tasks: Counter[str] = Counter()
    for index in range(3000):
        pieces = maker.document(index)
        assert sum(len(characters(piece)) for piece in pieces) == 99
        lines = [line for line in "".join(pieces).split("\n") if line]
        assert lines
        for number, line in enumerate(lines):
            task, items, right = solve(line)
            assert right
            assert 1 <= items <= 20
            if number == 0:
                first[items] += 1
                tasks[task] += 1
    assert set(first) == set(range(1, 21))
    assert min(first.values()) > 100  # 150 are expected
    assert min(tasks.values()) > 900
    again = ReasoningGenerator(TASKS, (1, 20), 100, 0, characters)
    assert again.document(5) == maker.document(5)
    assert ReasoningGenerator(TASKS, (1, 20), 100, 1, characters).document(5) != maker.document(5)


def test_problems_that_do_not_fit_are_refused_task_by_task() -> None:
    with pytest.raises(DataError, match="20 items of task copy") as caught:
        ReasoningGenerator(TASKS, (1, 20), 60, 0, characters)
    assert len(caught.value.problems) == 3
