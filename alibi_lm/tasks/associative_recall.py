"""Multi-query associative recall (MQAR, arXiv 2312.04927) as text: pairs, then queries.

A prompt states key-value pairs, one a line, each key once; after them keys are asked for again, and
what follows a key is its value. Keys of two capital letters and values of two digits keep pairs
short, as the single tokens of the published task are.
"""

from __future__ import annotations

from itertools import islice, product
from string import ascii_uppercase

from alibi_lm.tasks.answer_pools import Answer, equally_long
from alibi_lm.tasks.config import TaskSizes
from alibi_lm.tasks.haystack import Haystack
from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined
from alibi_lm.utils.errors import DataError, Problem

PAIR = "\n{key}: {value}"
QUERY = "\n{key}:"
"""A pair up to its value."""
VALUE = " {value}"
END = "\n"
"""After the last pair, before other text."""
KEYS = tuple("".join(letters) for letters in product(ascii_uppercase, repeat=2))
VALUES = tuple(str(number) for number in range(10, 100))


class Recall:
    """MQAR: pairs, text of the corpus, then queries, of which the last is scored.

    Earlier queries come with their answers. Every length thus asks for recall over about its whole
    distance. Closed set: the values of all pairs. Prompts have exactly the length asked for.
    """

    name = "mqar"
    metric: Metric = "begins"
    published = True

    def __init__(self, encode: Encoder, haystack: Haystack, seed: int, sizes: TaskSizes) -> None:
        """Make the pools of keys and values.

        Raises:
            DataError: the tokenizer cannot write enough values of one token length.
        """
        self._encode = encode
        self._haystack = haystack
        self._seed = seed
        self._pairs, self._queries = sizes.mqar_num_pairs, sizes.mqar_num_queries
        self._values = equally_long(encode.tokenizer, VALUE, list(VALUES))
        if len(self._values) < self._pairs:
            rule = f"writes only {len(self._values)} of {len(VALUES)} values in equally many tokens"
            raise DataError(Problem("tokenizer", None, rule, "use a tokenizer with digits"))

    @property
    def chance(self) -> float:
        """One in the number of pairs."""
        return 1 / self._pairs

    @property
    def answer_budget(self) -> int:
        """Tokens of a value."""
        return len(self._values[0].tokens)

    def shortest(self, length: int) -> int:
        """Pairs and queries, and text of a line's length between them."""
        widest = max(len(self._encode(QUERY.format(key=key))) for key in KEYS[:: len(KEYS) // 60])
        line = widest + 1 + self.answer_budget
        return line * (self._pairs + self._queries) + len(self._encode(END)) + line

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index`; a control states a different key instead of the queried one.

        Raises:
            DataError: the corpus already contains most keys.
        """
        generator = generator_of(self._seed, self.name, length, index)
        filler = self._haystack.sample(generator, length)
        text = filler.text
        order = (KEYS[i] for i in generator.permutation(len(KEYS)).tolist())
        free = (key for key in order if QUERY.format(key=key) not in text)
        keys = list(islice(free, self._pairs + 1))
        if len(keys) <= self._pairs:
            rule = "the haystack already contains most keys"
            raise DataError(Problem(self.name, None, rule, "choose another corpus"))
        spare = keys.pop()
        values = [self._values[i] for i in generator.permutation(len(self._values))[: self._pairs]]
        asked = generator.permutation(self._pairs)[: self._queries].tolist()
        wanted = asked[-1]
        stated = [spare if control and i == wanted else key for i, key in enumerate(keys)]
        pairs = [self._pair(key, value) for key, value in zip(stated, values, strict=True)]
        answered = [self._pair(keys[i], values[i]) for i in asked[:-1]]
        tail = [*answered, self._encode(QUERY.format(key=keys[wanted]))]
        end = self._encode(END)
        size = length - self.answer_budget - len(end) - sum(map(len, [*pairs, *tail]))
        tokens = joined([*pairs, end, filler.tokens[:size], *tail])
        return Prompt(
            tokens=tokens,
            answer_budget=self.answer_budget,
            references=(values[wanted].number,),
            distance=len(tokens) - sum(map(len, pairs[:wanted])),
            candidates=tuple(value.tokens for value in values),
            truth=wanted,
            counts={"pairs": len(pairs), "queries": len(asked)},
        )

    def _pair(self, key: str, value: Answer) -> list[int]:
        return [*self._encode(QUERY.format(key=key)), *value.tokens]
