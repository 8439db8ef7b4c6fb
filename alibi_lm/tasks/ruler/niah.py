"""Needles in a haystack as RULER has them (arXiv 2404.06654; its niah_* tasks).

Lines say `One of the special magic numbers for KEY is: VALUE.`; the question names keys, and the
answer's beginning is part of the prompt. The haystack is repeated filler, a real corpus (in place
of RULER's essays), or lines of the needle's own kind. Closed-set ranking is an addition of ours:
the value against others of the prompt, or of no prompt, by their first tokens.
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
"""RULER's: 40 depths, from which needles draw theirs without putting any back."""
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
"""Values drawn beyond those needed, as some may be in the haystack already."""


@dataclass(frozen=True)
class NiahSetting:
    """What tells the eight tasks apart."""

    haystack: Literal["noise", "corpus", "needle"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def single(self) -> bool:
        """Whether one value is the whole answer."""
        return self.num_values * self.num_queries == 1


@dataclass(frozen=True)
class _Line:
    """A needle, or a line of its kind in the haystack."""

    key: str
    value: str
    tokens: list[int]


Part = tuple[Sequence[int] | np.ndarray, _Line | None]
"""Tokens of the haystack, and the line that they are."""


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
        self._room = answer_budget or TOKENS_TO_GENERATE
        self._filler = encode(" ".join(FILLER) + "\n")
        values = _values(setting.values, np.random.default_rng([seed, _SPARE]), _SPARE)
        self._beginning = min(len(self._as_candidate(value)) for value in values)
        """Tokens of a value that are ranked."""

    @property
    def chance(self) -> float | None:
        """One of the candidates, where one value is the whole answer."""
        return 1 / self._num_candidates if self.setting.single else None

    @property
    def _num_candidates(self) -> int:
        # With several needles, their values alone: to repeat any of them is then chance.
        return self.setting.num_keys if self.setting.num_keys > 1 else NUM_CANDIDATES

    def shortest(self, length: int) -> int:
        """Room, question, needles, and as much haystack as needles (a line for each)."""
        generator = generator_of(self._seed, self.name, 0, 0)
        keys = _keys(self.setting.keys, generator, self.setting.num_keys)
        needles = self._needles(keys, _values(self.setting.values, generator, _SPARE))
        head, tail = self._frame(keys[: self.setting.num_queries])
        size = sum(len(needle.tokens) + 2 for needle in needles)
        noise = len(needles) * len(self._filler)
        size += noise if self.setting.haystack == "noise" else size
        # Keys and values differ in tokens from prompt to prompt.
        slack = (24 if self.setting.keys == "uuids" else 8) * (
            len(needles) + 2 * self.setting.num_queries
        )
        return len(head) + len(tail) + size + self._room + slack

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; exactly as many in a corpus.

        Raises:
            DataError: the corpus already holds too many of the keys or values.
        """
        generator = generator_of(self._seed, self.name, length, index)
        setting = self.setting
        cut = self._haystack.cut(generator, length) if setting.haystack == "corpus" else None
        text = cut.text if cut else ""
        others = length // self._least_line() if setting.haystack == "needle" else 0
        keys = _keys(setting.keys, generator, others + 4 * setting.num_keys + 8)
        keys = _absent(keys, text, setting.num_keys, self.name) + keys[4 * setting.num_keys + 8 :]
        count = setting.num_keys * setting.num_values
        drawn = _values(setting.values, generator, others + 4 * count + _SPARE)
        values, drawn = self._different(drawn[others:], text), drawn[:others]
        if len(values) < count + NUM_CANDIDATES:
            rule = "a haystack holds most values already"
            raise DataError(Problem(self.name, None, rule, "choose another corpus"))
        needles = self._needles(keys[: setting.num_keys], values)
        asked = generator.permutation(setting.num_keys)[: setting.num_queries].tolist()
        queries = [keys[index] for index in asked]
        answers = [needle for query in queries for needle in needles if needle.key == query]
        head, tail = self._frame(queries)
        size = length - self._room - len(head) - len(tail)
        shown = [needle for needle in needles if not (control and needle.key in queries)]
        shown = [shown[i] for i in generator.permutation(len(shown)).tolist()]
        if cut is not None:
            parts = self._in_corpus(cut, shown, len(needles), size, generator)
        else:
            lines = zip(keys[setting.num_keys :], drawn, strict=False)
            parts = self._in_lines(shown, len(needles), size, lines, generator)
        starts = np.cumsum([0, *(len(part) for part, _ in parts)]).tolist()
        found = [start for (_, line), start in zip(parts, starts, strict=False) if line in answers]
        stated = [line for _, line in parts if line is not None]
        candidates, truth = self._candidates(answers, stated, values[count:], generator)
        return Prompt(
            tokens=joined([head, *(part for part, _ in parts), tail]),
            answer_budget=self._room,
            references=tuple(needle.value for needle in answers),
            distance=starts[-1] - min(found, default=0) + len(tail),
            candidates=candidates,
            truth=truth,
            counts={"needles": len(shown), "lines": len(stated), "queries": len(queries),
                    "values": len(answers), "units": len(parts)},
        )  # fmt: skip

    def _frame(self, queries: list[str]) -> tuple[list[int], list[int]]:
        """What comes before and after the haystack."""
        kind = self.setting.values[:-1] if self.setting.single else self.setting.values
        head, tail = SINGULAR if self.setting.single else PLURAL
        return (
            self._encode(head.format(kind=kind)),
            self._encode.once(tail.format(kind=kind, query=listed(queries))),
        )

    def _needles(self, keys: list[str], values: list[str]) -> list[_Line]:
        owners = [key for key in keys for _ in range(self.setting.num_values)]
        return [self._line(key, value) for key, value in zip(owners, values, strict=False)]

    def _line(self, key: str, value: str) -> _Line:
        before = self._encode.once(NEEDLE.format(kind=self.setting.values, key=key))
        stated = self._encode.once(VALUE.format(value=value))
        return _Line(key, value, [*before, *stated, *self._encode(END)])

    def _least_line(self) -> int:
        """Fewer tokens than any line takes."""
        before = self._encode(NEEDLE.format(kind=self.setting.values, key=""))
        return max(1, len(before) - 2) + len(self._encode(END))

    def _as_candidate(self, value: str) -> list[int]:
        return self._encode.once(_CANDIDATE.format(value=value))

    def _different(self, values: list[str], text: str) -> list[str]:
        """Values that are not in the text and can be told apart by their first tokens."""
        known: dict[tuple[int, ...], str] = {}
        for value in values:
            tokens = self._as_candidate(value)
            if len(tokens) >= self._beginning and value not in text:
                known.setdefault(tuple(tokens[: self._beginning]), value)
        return list(known.values())

    def _in_corpus(
        self, cut: Slice, needles: list[_Line], num_places: int, size: int,
        generator: np.random.Generator,
    ) -> list[Part]:  # fmt: skip
        """Needles at RULER's depths between lines of the corpus, `size` tokens in all."""
        newline = self._encode("\n")  # the needle and the question begin a line
        total = size - len(newline) - sum(len(newline) + len(n.tokens) for n in needles)
        ends = line_ends(cut.texts[:total])
        depths = generator.choice(DEPTHS, size=num_places, replace=num_places > len(DEPTHS))
        parts: list[Part] = []
        last = 0
        for depth, needle in zip(np.sort(depths).tolist(), needles, strict=False):
            position, _ = place(ends, int(depth * total))
            parts += [(cut.tokens[last:position], None), (newline, None), (needle.tokens, needle)]
            last = position
        return [*parts, (cut.tokens[last:total], None), (newline, None)]

    def _in_lines(
        self, needles: list[_Line], num_places: int, size: int,
        others: Iterable[tuple[str, str]], generator: np.random.Generator,
    ) -> list[Part]:  # fmt: skip
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
        self, answers: list[_Line], stated: list[_Line], fresh: list[str],
        generator: np.random.Generator,
    ) -> tuple[tuple[tuple[int, ...], ...], int]:  # fmt: skip
        """The answer among values of the prompt, then values of none; and its index."""
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
    """The first `count` keys that a text does not hold."""
    free = [key for key in keys[: 4 * count + 8] if key not in text]
    if len(free) < count:
        rule = "a haystack holds most keys already"
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
