"""Training documents for recall: facts, filler, and queries in the form of the evals' prompts.

A document is a list of pieces of text. Each piece is to be encoded by itself and the token ids
joined, as the evals put their prompts together, so that a document's token ids are exactly those
of a prompt followed by its answers. Document i is a pure function of (settings, filler, i), and
takes time linear in its length.

Every fact is stated once and queried at most once, later. Keys and numbers are drawn for each
document, so that only the document itself helps to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.tasks import associative_recall as mqar
from alibi_lm.tasks import passkey, statements
from alibi_lm.utils.errors import DataError, Problem

KINDS = ("statements", "passkey", "pairs")
_MIN_FILLER = 2_000
"""Least characters of the filler's text."""


@dataclass(frozen=True)
class Fact:
    """One fact as pieces of text, and the pieces that ask for it and give its answer."""

    statement: tuple[str, ...]
    query: tuple[str, ...]


class Filler:
    """Text between facts, of an exact number of tokens.

    Raises:
        DataError: the text is too short.
    """

    def __init__(
        self, text: str, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Cut filler from a text.

        Args:
            text: the source; it wraps around at its end.
            encode, decode: text to token ids and back.
        """
        if len(text) < _MIN_FILLER:
            rule = f"gives {len(text):,} characters of filler, fewer than {_MIN_FILLER:,}"
            raise DataError(Problem("recall.filler", None, rule, "name a larger source"))
        self._text = text
        self._encode, self._decode = encode, decode
        characters = sorted(set(text[:_MIN_FILLER]) - set("0123456789"))
        self._singles = [character for character in characters if len(encode(character)) == 1]

    def sample(self, generator: np.random.Generator, num_tokens: int) -> tuple[str, ...]:
        """Pieces of `num_tokens` tokens in all, from a random place of the text."""
        pieces: list[str] = []
        while num_tokens > 0:
            start = int(generator.integers(len(self._text)))
            text = self._from(start, 8 * num_tokens + 64)
            piece, size = self._prefix(text, num_tokens)
            if size == 0:
                if not self._singles:
                    break  # no character is one token: the document is a little shorter
                piece, size = self._singles[int(generator.integers(len(self._singles)))], 1
            pieces.append(piece)
            num_tokens -= size
        return tuple(pieces)

    def as_pieces(self, ids: list[int]) -> tuple[str, ...]:
        """Texts that encode to the ids: one if it round-trips, else one a token that does."""
        text = self._decode(ids)
        if self._encode(text) == ids:
            return (text,)
        singles = [(self._decode([token]), token) for token in ids]
        return tuple(text for text, token in singles if self._encode(text) == [token])

    def _from(self, start: int, size: int) -> str:
        """About `size` characters of the text, from the line after `start`."""
        line = self._text.find("\n", start, start + 400) + 1 or start
        text = self._text[line : line + size]
        return text if len(text) == size else text + self._text[: size - len(text)]

    def _prefix(self, text: str, num_tokens: int) -> tuple[str, int]:
        """The longest of a few prefixes of at most `num_tokens` tokens that round-trips."""
        ids = self._encode(text)[:num_tokens]
        for size in range(len(ids), max(0, len(ids) - 8), -1):
            piece = self._decode(ids[:size])
            if piece and len(self._encode(piece)) == size:
                return piece, size
        return "", 0


class RecallGenerator:
    """Makes documents of at most, and where the tokenizer allows exactly, `max_tokens` tokens.

    Raises:
        DataError: a kind does not fit into `max_tokens`.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        max_tokens: int,
        dense: float,
        seed: int,
        filler: Filler,
        encode: Callable[[str], list[int]],
    ) -> None:
        """Set what documents are made of.

        Args:
            kinds: of KINDS; each document has one, drawn uniformly. A kind named twice comes twice
                as often.
            max_tokens: tokens of a document, its end-of-sequence token included.
            dense: fraction of documents with as many facts as fit.
            seed: of everything that is drawn.
            filler: the text between facts.
            encode: text to token ids.
        """
        self._kinds = tuple(kinds)
        self._budget = max_tokens - 1
        self._dense = dense
        self._seed = seed
        self._filler = filler
        self._encode = encode
        self._sizes: dict[str, int] = {}
        self._make = {
            "statements": self._statements,
            "passkey": self._passkey,
            "pairs": self._pairs,
        }
        for kind in dict.fromkeys(kinds):
            if not any(self._document(kind, index) for index in range(4)):
                rule = f"is too short for one fact and its query of kind {kind}"
                raise DataError(Problem("recall.max_tokens", max_tokens, rule, "raise it"))

    def document(self, index: int) -> tuple[str, ...]:
        """The pieces of document `index`; none of them is empty."""
        generator = np.random.default_rng([self._seed, index])
        kind = self._kinds[int(generator.integers(len(self._kinds)))]
        return self._document(kind, index)

    def _document(self, kind: str, index: int) -> tuple[str, ...]:
        generator = np.random.default_rng([self._seed, index, KINDS.index(kind)])
        return tuple(piece for piece in self._make[kind](generator) if piece)

    def _statements(self, generator: np.random.Generator) -> tuple[str, ...]:
        """Needles: lines that state a number for a key, spread over text, then queried."""
        most = max(1, self._budget // 24)
        keys = generator.permutation(len(statements.KEYS))[:most]
        numbers = _different_numbers(generator, statements.NUM_DIGITS, len(keys))
        facts = []
        for key, number in zip(keys.tolist(), numbers, strict=True):
            question = statements.STATEMENT.format(key=statements.KEYS[key])
            line = (question, statements.ANSWER.format(number=number), statements.END)
            facts.append(Fact(line, line))
        return self._spread(generator, facts)

    def _pairs(self, generator: np.random.Generator) -> tuple[str, ...]:
        """Key-value pairs, one a line, then queried."""
        most = max(1, self._budget // 8)
        keys = generator.permutation(len(mqar.KEYS))[:most]
        facts = []
        for key in keys.tolist():
            value = mqar.VALUES[int(generator.integers(len(mqar.VALUES)))]
            question = mqar.QUERY.format(key=mqar.KEYS[key])
            line = (question, mqar.VALUE.format(value=value))
            facts.append(Fact(line, line))
        chosen = self._chosen(generator, facts, self._size((mqar.END,)))
        if not chosen:
            return ()
        stated = [piece for fact in chosen for piece in fact.statement]
        asked = [piece for fact in _shuffled(generator, chosen) for piece in fact.query]
        filler_budget = (
            self._budget - self._size(stated) - self._size(asked) - self._size((mqar.END,))
        )
        before = int(generator.integers(filler_budget + 1)) if filler_budget else 0
        return (
            *self._filler.sample(generator, before),
            *stated,
            mqar.END,
            *self._filler.sample(generator, filler_budget - before),
            *asked,
        )

    def _passkey(self, generator: np.random.Generator) -> tuple[str, ...]:
        """One key in repeated sentences."""
        (number,) = _different_numbers(generator, passkey.NUM_DIGITS, 1)
        answer = passkey.ANSWER.format(key=number)
        # The statement in the parts in which the eval encodes it.
        first, middle, last = (part.rstrip(" ") for part in passkey.KEY_LINE.split("{key}"))
        line = (first, answer, middle, answer, last)
        end = (passkey.QUESTION, answer)
        filler_budget = self._budget - self._size((passkey.HEAD, *line, *end))
        if filler_budget < 0:
            return ()
        after = self._sentences(int(generator.integers(filler_budget + 1)))
        before = self._end_of_sentences(filler_budget - self._size(after))
        prompt = (passkey.HEAD, *before, *line, *after, *end)
        # Almost always empty: the rest of a sentence that is encoded differently on its own.
        return (*prompt, *self._filler.sample(generator, self._budget - self._size(prompt)))

    def _sentences(self, num_tokens: int) -> tuple[str, ...]:
        """The passkey's filler: whole sentences in order, at most `num_tokens` tokens of them."""
        pieces: list[str] = []
        while True:
            sentence = passkey.FILLER[len(pieces) % len(passkey.FILLER)]
            piece = " " + sentence if pieces else sentence
            num_tokens -= self._size((piece,))
            if num_tokens < 0:
                return tuple(pieces)
            pieces.append(piece)

    def _end_of_sentences(self, num_tokens: int) -> tuple[str, ...]:
        """The last `num_tokens` tokens of the repeated sentences, a truncated one first."""
        pieces: list[str] = []
        while num_tokens > 0:
            piece = " " + passkey.FILLER[-1 - len(pieces) % len(passkey.FILLER)]
            size = self._size((piece,))
            if size > num_tokens:
                ids = self._encode(piece)[-num_tokens:]
                return (*self._filler.as_pieces(ids), *reversed(pieces))
            pieces.append(piece)
            num_tokens -= size
        return tuple(reversed(pieces))

    def _spread(self, generator: np.random.Generator, facts: list[Fact]) -> tuple[str, ...]:
        """Facts at random places of filler, then all their queries in another order."""
        chosen = self._chosen(generator, facts, 0)
        if not chosen:
            return ()
        asked = [piece for fact in _shuffled(generator, chosen) for piece in fact.query]
        filler_budget = self._budget - self._size(asked)
        filler_budget -= sum(self._size(fact.statement) for fact in chosen)
        places = np.sort(generator.integers(filler_budget + 1, size=len(chosen))).tolist()
        pieces: list[str] = []
        for before, place, fact in zip([0, *places], places, chosen, strict=False):
            pieces += [*self._filler.sample(generator, place - before), *fact.statement]
        return (*pieces, *self._filler.sample(generator, filler_budget - places[-1]), *asked)

    def _chosen(self, generator: np.random.Generator, facts: list[Fact], extra: int) -> list[Fact]:
        """As many facts as fit or, in documents that are not dense, a random number of them."""
        left, fitting = self._budget - extra, []
        for fact in facts:
            left -= self._size(fact.statement) + self._size(fact.query)
            if left < 0:
                break
            fitting.append(fact)
        if not fitting or generator.random() < self._dense:
            return fitting
        # Log-uniform: few facts are as frequent as many, from which models learn to retrieve.
        return fitting[: int(np.exp(generator.random() * np.log(len(fitting) + 1)))]

    def _size(self, pieces: Sequence[str]) -> int:
        """Tokens of pieces that are encoded one by one."""
        total = 0
        for piece in pieces:
            if piece not in self._sizes:
                if len(self._sizes) > 100_000:
                    self._sizes.clear()
                self._sizes[piece] = len(self._encode(piece))
            total += self._sizes[piece]
        return total


def _different_numbers(generator: np.random.Generator, num_digits: int, count: int) -> list[str]:
    """Numbers of exactly `num_digits` digits, no two the same."""
    low = 10 ** (num_digits - 1)
    return [str(low + n) for n in generator.choice(9 * low, size=count, replace=False).tolist()]


def _shuffled(generator: np.random.Generator, facts: list[Fact]) -> list[Fact]:
    return [facts[index] for index in generator.permutation(len(facts)).tolist()]
