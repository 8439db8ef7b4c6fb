"""Needles in a haystack as RULER has them (arXiv 2404.06654; its niah_* tasks).

Lines say `One of the special magic numbers for KEY is: VALUE.`; the question names keys, and the
answer's beginning is part of the prompt. The haystack is repeated filler, a real corpus (in place
of RULER's essays), or lines of the needle's own kind. Closed-set ranking is an addition of ours:
the value against others of the prompt, or unused ones, by their first tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from alibi_lm.tasks.haystack import Haystack, Slice, line_ends, place
from alibi_lm.tasks.passkey import FILLER
from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined, listed
from alibi_lm.tasks.words import NUM_KEYS, key_word
from alibi_lm.utils.errors import DataError, Problem

TOKENS_TO_GENERATE = 128
NUM_CANDIDATES = 10
DEPTHS = np.round(np.linspace(0, 100, num=40)) / 100
"""RULER's 40 depths, which needles draw without replacement."""
NEEDLE = "One of the special magic {kind} for {key} is:"
VALUE = " {value}"
END = ".\n"
SINGULAR = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n",
    "What is the special magic {kind} for {query} mentioned in the provided text? The special "
    "magic {kind} for {query} mentioned in the provided text is",
)
PLURAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n",
    "What are all the special magic {kind} for {query} mentioned in the provided text? The special "
    "magic {kind} for {query} mentioned in the provided text are",
)
_CANDIDATE = ": {value}"
_SPARE = 64
"""Extra values, because the haystack may contain some already."""


@dataclass(frozen=True)
class NiahSetting:
    """The settings in which the eight tasks differ."""

    haystack: Literal["noise", "corpus", "needle"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def single(self) -> bool:
        """Whether a single value is the answer."""
        return self.num_values * self.num_queries == 1


@dataclass(frozen=True)
class _Line:
    """A needle, or a line of its kind in the haystack."""

    key: str
    value: str
    tokens: list[int]


Part = tuple[Sequence[int] | np.ndarray, _Line | None]
"""Tokens of the haystack, and the line they spell, if they are one."""


class Niah:
    """One of the eight tasks."""

    metric: Metric = "all"

    def __init__(
        self,
        name: str,
        setting: NiahSetting,
        encode: Encoder,
        haystack: Haystack,
        seed: int,
        answer_budget: int | None = None,
        published: bool = True,
    ) -> None:
        self.name = name
        self.setting = setting
        self.published = published and answer_budget in (None, TOKENS_TO_GENERATE)
        self._encode = encode
        self._haystack = haystack
        self._seed = seed
        self._answer_budget = answer_budget or TOKENS_TO_GENERATE
        self._filler = encode(" ".join(FILLER) + "\n")
        values = _values(setting.values, np.random.default_rng([seed, _SPARE]), _SPARE)
        self._beginning = min(len(self._as_candidate(value)) for value in values)
        """First tokens of a value that ranking compares."""

    @property
    def chance(self) -> float | None:
        """One in the number of candidates, if a single value is the answer."""
        return 1 / self._num_candidates if self.setting.single else None

    @property
    def _num_candidates(self) -> int:
        # With several needles their values alone, so that repeating any of them scores chance.
        return self.setting.num_keys if self.setting.num_keys > 1 else NUM_CANDIDATES

    def shortest(self, length: int) -> int:
        """Answer budget, question, needles, and as much haystack as needles (a line for each)."""
        generator = generator_of(self._seed, self.name, 0, 0)
        keys = _keys(self.setting.keys, generator, self.setting.num_keys)
        needles = self._needles(keys, _values(self.setting.values, generator, _SPARE))
        head, tail = self._frame(keys[: self.setting.num_queries])
        size = sum(len(needle.tokens) + 2 for needle in needles)
        noise = len(needles) * len(self._filler)
        size += noise if self.setting.haystack == "noise" else size
        # The number of tokens of keys and values varies between prompts.
        slack = (24 if self.setting.keys == "uuids" else 8) * (
            len(needles) + 2 * self.setting.num_queries
        )
        return len(head) + len(tail) + size + self._answer_budget + slack

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; exactly as many in a corpus.

        Raises:
            DataError: the corpus already contains too many of the keys or values.
        """
        generator = generator_of(self._seed, self.name, length, index)
        setting = self.setting
        corpus = None
        if setting.haystack == "corpus":
            corpus = self._haystack.sample(generator, length)
        text = corpus.text if corpus else ""
        others = length // self._least_line() if setting.haystack == "needle" else 0
        keys = _keys(setting.keys, generator, others + 4 * setting.num_keys + 8)
        keys = _absent(keys, text, setting.num_keys, self.name) + keys[4 * setting.num_keys + 8 :]
        count = setting.num_keys * setting.num_values
        drawn = _values(setting.values, generator, others + 4 * count + _SPARE)
        values, drawn = self._different(drawn[others:], text), drawn[:others]
        if len(values) < count + NUM_CANDIDATES:
            rule = "the haystack already contains most values"
            raise DataError(Problem(self.name, None, rule, "choose another corpus"))
        needles = self._needles(keys[: setting.num_keys], values)
        asked = generator.permutation(setting.num_keys)[: setting.num_queries].tolist()
        queries = [keys[index] for index in asked]
        answers = [needle for query in queries for needle in needles if needle.key == query]
        head, tail = self._frame(queries)
        size = length - self._answer_budget - len(head) - len(tail)
        shown = [needle for needle in needles if not (control and needle.key in queries)]
        shown = [shown[i] for i in generator.permutation(len(shown)).tolist()]
        if corpus is not None:
            parts = self._in_corpus(corpus, shown, len(needles), size, generator)
        else:
            lines = zip(keys[setting.num_keys :], drawn, strict=False)
            parts = self._in_lines(shown, len(needles), size, lines, generator)
        starts = np.cumsum([0, *(len(part) for part, _ in parts)]).tolist()
        needed = [start for (_, line), start in zip(parts, starts, strict=False) if line in answers]
        stated = [line for _, line in parts if line is not None]
        candidates, truth = self._candidates(answers, stated, values[count:], generator)
        return Prompt(
            tokens=joined([head, *(part for part, _ in parts), tail]),
            answer_budget=self._answer_budget,
            references=tuple(needle.value for needle in answers),
            distance=starts[-1] - min(needed, default=0) + len(tail),
            candidates=candidates,
            truth=truth,
            counts={
                "needles": len(shown),
                "lines": len(stated),
                "queries": len(queries),
                "values": len(answers),
                "units": len(parts),
            },
        )

    def _frame(self, queries: list[str]) -> tuple[list[int], list[int]]:
        """The text before and after the haystack."""
        kind = self.setting.values[:-1] if self.setting.single else self.setting.values
        head, tail = SINGULAR if self.setting.single else PLURAL
        return (
            self._encode(head.format(kind=kind)),
            self._encode.uncached(tail.format(kind=kind, query=listed(queries))),
        )

    def _needles(self, keys: list[str], values: list[str]) -> list[_Line]:
        owners = [key for key in keys for _ in range(self.setting.num_values)]
        return [self._line(key, value) for key, value in zip(owners, values, strict=False)]

    def _line(self, key: str, value: str) -> _Line:
        before = self._encode.uncached(NEEDLE.format(kind=self.setting.values, key=key))
        stated = self._encode.uncached(VALUE.format(value=value))
        return _Line(key, value, [*before, *stated, *self._encode(END)])

    def _least_line(self) -> int:
        """A lower bound on the tokens of a line."""
        before = self._encode(NEEDLE.format(kind=self.setting.values, key=""))
        return max(1, len(before) - 2) + len(self._encode(END))

    def _as_candidate(self, value: str) -> list[int]:
        return self._encode.uncached(_CANDIDATE.format(value=value))

    def _different(self, values: list[str], text: str) -> list[str]:
        """Values that are not in the text and differ in their first tokens."""
        known: dict[tuple[int, ...], str] = {}
        for value in values:
            tokens = self._as_candidate(value)
            if len(tokens) >= self._beginning and value not in text:
                known.setdefault(tuple(tokens[: self._beginning]), value)
        return list(known.values())

    def _in_corpus(
        self,
        corpus: Slice,
        needles: list[_Line],
        num_places: int,
        size: int,
        generator: np.random.Generator,
    ) -> list[Part]:
        """Needles at RULER's depths between lines of the corpus, `size` tokens in all."""
        newline = self._encode("\n")  # the needle and the question begin a line
        total = size - len(newline) - sum(len(newline) + len(n.tokens) for n in needles)
        ends = line_ends(corpus.texts[:total])
        depths = generator.choice(DEPTHS, size=num_places, replace=num_places > len(DEPTHS))
        parts: list[Part] = []
        last = 0
        for depth, needle in zip(np.sort(depths).tolist(), needles, strict=False):
            position, _ = place(ends, int(depth * total))
            parts += [
                (corpus.tokens[last:position], None),
                (newline, None),
                (needle.tokens, needle),
            ]
            last = position
        return [*parts, (corpus.tokens[last:total], None), (newline, None)]

    def _in_lines(
        self,
        needles: list[_Line],
        num_places: int,
        size: int,
        others: Iterable[tuple[str, str]],
        generator: np.random.Generator,
    ) -> list[Part]:
        """Needles between lines of filler, or of their own kind: at most `size` tokens."""
        size -= sum(len(needle.tokens) for needle in needles)
        units: list[Part] = []
        if self.setting.haystack == "noise":
            units = [(self._filler, None)] * (size // len(self._filler))
        for key, value in others:
            line = self._line(key, value)
            if len(line.tokens) > size:
                break
            units.append((line.tokens, line))
            size -= len(line.tokens)
        places = np.sort(generator.choice(len(units), size=num_places, replace=False)).tolist()
        for shift, (position, needle) in enumerate(zip(places, needles, strict=False)):
            units.insert(position + shift, (needle.tokens, needle))
        return units

    def _candidates(
        self,
        answers: list[_Line],
        stated: list[_Line],
        fresh: list[str],
        generator: np.random.Generator,
    ) -> tuple[tuple[tuple[int, ...], ...], int]:
        """The answer among values of the prompt, filled up with others; and its index."""
        if not self.setting.single:
            return (), 0
        right = answers[0].value
        order = generator.permutation(len(stated)).tolist()
        near = [stated[i].value for i in order[: 4 * NUM_CANDIDATES] if stated[i].value != right]
        values = self._different([right, *near, *fresh], "")[: self._num_candidates]
        shuffled = [values[i] for i in generator.permutation(len(values)).tolist()]
        tokens = [tuple(self._as_candidate(value)[: self._beginning]) for value in shuffled]
        return tuple(tokens), shuffled.index(right)


def _keys(kind: str, generator: np.random.Generator, count: int) -> list[str]:
    """Different keys."""
    if kind == "uuids":
        return _uuids(generator, count)
    if count > NUM_KEYS:
        rule = f"needs {count:,} keys, and there are {NUM_KEYS:,}"
        raise DataError(Problem("niah", None, rule, "give a shorter length"))
    chosen = generator.choice(NUM_KEYS, size=count, replace=False)
    return [key_word(index) for index in chosen.tolist()]


def _values(kind: str, generator: np.random.Generator, count: int) -> list[str]:
    """Different values: numbers of seven digits, or uuids."""
    if kind == "uuids":
        return _uuids(generator, count)
    numbers = 10**6 + generator.choice(9 * 10**6, size=count, replace=False)
    return list(map(str, numbers.tolist()))


def _uuids(generator: np.random.Generator, count: int) -> list[str]:
    raw = generator.bytes(16 * count)
    return [str(uuid.UUID(bytes=raw[16 * i : 16 * i + 16], version=4)) for i in range(count)]


def _absent(keys: list[str], text: str, count: int, task: str) -> list[str]:
    """The first `count` keys that a text does not contain."""
    free = [key for key in keys[: 4 * count + 8] if key not in text]
    if len(free) < count:
        rule = "the haystack already contains most keys"
        raise DataError(Problem(task, None, rule, "choose another corpus"))
    return free[:count]


NIAH = {
    "niah_single_1": NiahSetting("noise"),
    "niah_single_2": NiahSetting("corpus"),
    "niah_single_3": NiahSetting("corpus", values="uuids"),
    "niah_multikey_1": NiahSetting("corpus", num_keys=4),
    "niah_multikey_2": NiahSetting("needle"),
    "niah_multikey_3": NiahSetting("needle", keys="uuids", values="uuids"),
    "niah_multivalue": NiahSetting("corpus", num_values=4),
    "niah_multiquery": NiahSetting("corpus", num_keys=4, num_queries=4),
}
"""RULER's eight settings."""
