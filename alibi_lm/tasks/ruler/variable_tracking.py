"""Variable tracking, RULER's vt: chains of assignments hidden in repeated filler.

`VAR A = 12345`, `VAR B = VAR A`, ...: the answer is every variable that has the first chain's
value. A solved example of the same kind, with names of three letters, comes before.
"""

from __future__ import annotations

from string import ascii_uppercase

import numpy as np

from alibi_lm.tasks.config import TaskSizes
from alibi_lm.tasks.passkey import FILLER
from alibi_lm.tasks.prompt import Encoder, Metric, Prompt, generator_of, joined

TOKENS_TO_GENERATE = 30
HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TAIL = (
    "\nQuestion: Find all variables that are assigned the value {query} in the text above. Answer: "
    "According to the chain(s) of variable assignment in the text above, {num_v} variables are "
    "assigned the value {query}, they are: "
)
FIRST = "VAR {name} = {value}\n"
NEXT = "VAR {name} = VAR {before} \n"
NAME_LETTERS, EXAMPLE_LETTERS = 5, 3


class Tracking:
    """vt."""

    name = "vt"
    metric: Metric = "all"
    chance = None

    def __init__(self, encode: Encoder, seed: int, sizes: TaskSizes) -> None:
        self._encode = encode
        self._seed = seed
        self._chains, self._hops = sizes.vt_num_chains, sizes.vt_num_hops
        self._example_tokens = sizes.vt_example_tokens
        self._answer_budget = sizes.tokens_to_generate or TOKENS_TO_GENERATE
        defaults = TaskSizes()
        self.published = (
            self._answer_budget == TOKENS_TO_GENERATE
            and self._hops == defaults.vt_num_hops
            and self._chains == defaults.vt_num_chains
            and self._example_tokens == defaults.vt_example_tokens
        )
        self._filler = encode(" ".join(FILLER) + "\n")

    def _least(self, letters: int, chains: int) -> int:
        """Tokens of a body with one line of filler for each assignment, or more than that."""
        links = chains * (self._hops + 1)
        samples = _names(np.random.default_rng(letters), 64, letters)
        line = max(len(self._encode(NEXT.format(name=n, before=n))) for n in samples)
        tail = self._encode(TAIL.format(query="10000", num_v=self._hops + 1))
        head = len(self._encode(HEAD))
        return head + len(tail) + 8 + links * (line + len(self._filler))

    def shortest(self, length: int) -> int:
        """Example, question, chains, a line of filler for each assignment, and room."""
        example = 0
        if self._example_tokens:
            names = (EXAMPLE_LETTERS + 2) * (self._hops + 1)
            example = max(self._example_tokens, self._least(EXAMPLE_LETTERS, 1)) + names + 2
        return example + self._least(NAME_LETTERS, self._chains) + self._answer_budget

    def prompt(self, length: int, index: int, control: bool = False) -> Prompt:
        """Prompt `index` of at most `length` tokens; a control lacks the chain asked for."""
        generator = generator_of(self._seed, self.name, length, index)
        example: list[int] = []
        num_example = 0
        if self._example_tokens:
            size = max(self._example_tokens, self._least(EXAMPLE_LETTERS, 1))
            shot, names, _, _ = self._body(generator, size, EXAMPLE_LETTERS, 1, False)
            example = [*shot.tolist(), *self._encode.uncached(" " + " ".join(names) + "\n\n")]
            num_example = 1
        size = length - self._answer_budget - len(example)
        body, names, start, counts = self._body(
            generator, size, NAME_LETTERS, self._chains, control
        )
        return Prompt(
            tokens=joined([example, body]),
            answer_budget=self._answer_budget,
            references=tuple(names),
            distance=len(body) - start,
            counts={**counts, "hops": self._hops, "examples": num_example},
        )

    def _body(
        self,
        generator: np.random.Generator,
        size: int,
        letters: int,
        num_chains: int,
        control: bool,
    ) -> tuple[np.ndarray, list[str], int, dict[str, int]]:
        """One problem of at most `size` tokens: tokens, the names asked for, where they begin."""
        links = self._hops + 1
        names = _names(generator, num_chains * links, letters)
        values = 10000 + generator.choice(89999, size=num_chains, replace=False)
        value = str(values[0])
        tail = self._encode.uncached(TAIL.format(query=value, num_v=links))
        chains = [
            self._chain(names[i * links : (i + 1) * links], str(values[i]))
            for i in range(num_chains)
        ]
        # A control has no chain with the value asked for; the others stay.
        shown = chains[1:] if control else chains
        space = size - len(self._encode(HEAD)) - len(tail)
        space -= sum(len(line) for chain in shown for line in chain)
        lines: list[list[int]] = [self._filler] * (space // len(self._filler))
        first: list[int] = []
        for chain in shown:
            places = np.sort(generator.choice(len(lines), size=links, replace=False)).tolist()
            for shift, (position, line) in enumerate(zip(places, chain, strict=True)):
                lines.insert(position + shift, line)
            first = first or chain[0]
        parts = [self._encode(HEAD), *lines, tail]
        start = 0
        if first and not control:
            before = next(i for i, part in enumerate(parts) if part is first)
            start = sum(map(len, parts[:before]))
        counts = {"chains": len(shown), "lines": len(lines)}
        return joined(parts), names[:links], start, counts

    def _chain(self, names: list[str], value: str) -> list[list[int]]:
        first = self._encode.uncached(FIRST.format(name=names[0], value=value))
        pairs = zip(names[1:], names, strict=False)
        return [first, *(self._encode.uncached(NEXT.format(name=a, before=b)) for a, b in pairs)]


def _names(generator: np.random.Generator, count: int, letters: int) -> list[str]:
    """Different names of capital letters."""
    codes = generator.choice(26**letters, size=count, replace=False)
    names = []
    for code in codes.tolist():
        name = ""
        for _ in range(letters):
            code, letter = divmod(code, 26)
            name += ascii_uppercase[letter]
        names.append(name)
    return names
