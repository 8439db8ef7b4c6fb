"""Questions over documents, RULER's qa, from a file of the user's.

Each line of the file is a JSON object: `question`, `answers` (a text or a list of them) and the
documents that hold the answer: `context`, or `documents`, a text or a list. The documents of other
questions are the haystack, but for those that hold an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined
from alibi_lm.utils.errors import DataError, Problem

TOKENS_TO_GENERATE = 32
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
HEAD = INSTRUCTION + "\n\nThe following are given documents.\n\n"
TAIL = INSTRUCTION + "\n\nQuestion: {query} Answer:"
DOCUMENT = "Document {number}:\n"
BREAK = "\n\n"
LEAST_FILL = 0.5
"""Share of a length that the file's documents must at least fill."""
_MISSES = 20
"""Documents in a row that do not fit, before a prompt counts as full."""


@dataclass(frozen=True)
class Question:
    """A line of the file."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Places of its documents among all different ones."""


class QuestionAnswering:
    """qa_1, qa_2: one task a file."""

    metric: Metric = "part"
    chance = None
    published = False  # the file is not RULER's

    def __init__(
        self, name: str, path: Path, encode: Encoder, seed: int, answer_budget: int | None
    ) -> None:
        """Read the file.

        Raises:
            DataError: naming the file and each wrong line.
        """
        self.name = name
        self._path = path
        self._encode = encode
        self._seed = seed
        self._answer_budget = answer_budget or TOKENS_TO_GENERATE
        self._questions, self._texts = read_questions(path)
        self._documents = [encode.uncached(text) for text in self._texts]
        break_ = len(encode(BREAK))
        header = len(encode(DOCUMENT.format(number=len(self._texts) + 1)))
        self._overhead = break_ + header
        self._needed = [self._need(question) for question in self._questions]

    def _need(self, question: Question) -> int:
        documents = sum(len(self._documents[i]) + self._overhead for i in question.documents)
        tail = self._encode.uncached(TAIL.format(query=question.text))
        frame = len(self._encode(HEAD)) + len(tail)
        return documents + frame + self._answer_budget

    def shortest(self, length: int) -> int:
        """The least length that any question's documents fit into.

        Raises:
            DataError: all documents of the file together do not fill half of `length`.
        """
        total = sum(map(len, self._documents)) + len(self._documents) * self._overhead
        if total < LEAST_FILL * length:
            rule = f"its documents have {total:,} tokens in all, too few for {length:,}"
            raise DataError(Problem(str(self._path), None, rule, "give shorter lengths"))
        return min(self._needed)

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; a control lacks the question's documents."""
        fitting = [i for i, needed in enumerate(self._needed) if needed <= length]
        order = np.random.default_rng([self._seed, length]).permutation(len(fitting))
        question = self._questions[fitting[int(order[index % len(fitting)])]]
        generator = generator_of(self._seed, self.name, length, index)
        head = self._encode(HEAD)
        tail = self._encode.uncached(TAIL.format(query=question.text))
        needed = [] if control else list(question.documents)
        space = length - self._answer_budget - len(head) - len(tail)
        chosen = self._filled(question, needed, space, generator)
        shuffled = [chosen[i] for i in generator.permutation(len(chosen)).tolist()]
        parts: list[list[int]] = [head]
        start = None
        for number, document in enumerate(shuffled, 1):
            if start is None and document in needed:
                start = sum(map(len, parts))
            header = self._encode(DOCUMENT.format(number=number))
            parts += [header, self._documents[document], self._encode(BREAK)]
        tokens = joined([*parts, tail])
        return Prompt(
            tokens=tokens,
            answer_budget=self._answer_budget,
            references=question.answers,
            distance=len(tokens) - (start or 0),
            counts={"documents": len(shuffled), "needed": len(needed)},
        )

    def _size(self, document: int, number: int) -> int:
        """Tokens of a document that stands at place `number` of a prompt."""
        header = self._encode(DOCUMENT.format(number=number))
        return len(header) + len(self._documents[document]) + len(self._encode(BREAK))

    def _filled(
        self, question: Question, needed: list[int], space: int, generator: np.random.Generator
    ) -> list[int]:
        """The given documents, and others without an answer in them, as many as fit."""
        answers = [answer.lower() for answer in question.answers]
        space -= sum(self._size(document, number) for number, document in enumerate(needed, 1))
        chosen, misses = list(needed), 0
        for document in generator.permutation(len(self._documents)).tolist():
            size = self._size(document, len(chosen) + 1)
            if size > space:
                misses += 1
                if misses == _MISSES:
                    break
                continue
            text = self._texts[document].lower()
            if document in question.documents or any(answer in text for answer in answers):
                continue
            chosen.append(document)
            space -= size
            misses = 0
        return chosen


def read_questions(path: Path) -> tuple[list[Question], list[str]]:
    """The questions of a file, and its different documents.

    Raises:
        DataError: naming the file and each wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(Problem(str(path), None, "no such file", "check the path")) from None
    except UnicodeDecodeError:
        raise DataError(Problem(str(path), None, "is not UTF-8 text", "give JSON lines")) from None
    places: dict[str, int] = {}
    questions, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question, answers, documents = _fields(json.loads(line))
        except ValueError as error:
            fix = "give question, answers, and context or documents"
            problems.append(Problem(f"{path}:{number}", None, str(error), fix))
            continue
        needed = tuple(places.setdefault(text, len(places)) for text in documents)
        questions.append(Question(question, answers, needed))
    if not questions and not problems:
        problems.append(Problem(str(path), None, "holds no question", "give JSON lines"))
    if problems:
        raise DataError(*problems[:10])
    return questions, list(places)


def _fields(raw: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Question, answers and documents of a line; ValueError says what is wrong."""
    if not isinstance(raw, dict):
        raise ValueError("is not a JSON object")
    question = raw.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("has no question")
    answers = _texts(raw.get("answers", raw.get("answer")), "answers")
    documents = _texts(raw.get("documents", raw.get("context")), "context or documents")
    return question, answers, tuple(dict.fromkeys(documents))


def _texts(value: Any, name: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise ValueError(f"has no {name}")
    if not all(isinstance(text, str) and text.strip() for text in values):
        raise ValueError(f"has {name} that are not texts")
    return tuple(values)
