"""Sizes of the retrieval tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import Section, rule

QA = ("qa_1", "qa_2")
RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", *QA),
)
"""The thirteen columns of RULER's table, in its order."""
TASKS = ("passkey", "mqar", *RULER)
ADDED_TASKS: list[str] = []
"""Names that plugins have registered by `alibi_lm.tasks.registry.register_task`."""


def default_tasks(num_qa_files: int) -> list[str]:
    """Every task that needs no file, and a qa task for each file."""
    return [name for name in TASKS if name not in QA[num_qa_files:]]


@dataclass
class TaskSizes(Section):
    """Sizes of the retrieval tasks; the defaults are RULER's.

    Models with a small tokenizer or a short training length need smaller ones. Results then say
    that the sizes are not RULER's.
    """

    tokens_to_generate: PositiveInt | None = None
    """Tokens reserved for the answer in RULER's tasks, part of the length; by default 128 in niah,
    30 in vt, 120 in cwe, 50 in fwe, 32 in qa."""
    num_keys: PositiveInt = 4
    """Keys in niah_multikey_1."""
    num_values: PositiveInt = 4
    """Values of the key in niah_multivalue."""
    num_queries: PositiveInt = 4
    """Keys asked for in niah_multiquery."""
    vt_num_chains: PositiveInt = 1
    """Chains of assignments in vt; the question is about the first."""
    vt_num_hops: PositiveInt = 4
    """Assignments in a chain of vt after its first."""
    vt_example_tokens: NonNegativeInt = 500
    """Tokens of the solved example before vt's question; 0 leaves it out."""
    cwe_num_common: PositiveInt = 10
    """Common words in cwe."""
    cwe_common_repeats: PositiveInt | None = None
    """Repetitions of a common word in cwe; by default 30, or 6 at lengths below 4,096."""
    cwe_uncommon_repeats: PositiveInt | None = None
    """Repetitions of any other word in cwe; by default 3, or 1 at lengths below 4,096."""
    cwe_example: bool = True
    """Whether a solved example comes before cwe's question."""
    fwe_alpha: Annotated[float, Field(gt=1)] = 2.0
    """Exponent of the zeta distribution of words in fwe."""
    fwe_num_words: Annotated[int, Field(ge=4)] | None = None
    """Different words in fwe; by default 1/50 of the prompt's tokens."""
    mqar_num_pairs: Annotated[int, Field(ge=2, le=64)] = 8
    """Key-value pairs in mqar."""
    mqar_num_queries: PositiveInt = 4
    """Keys asked for in mqar; the last one is scored."""
    passkey_num_distances: PositiveInt = 8
    """Evenly spaced distances of the passkey at each length."""

    @rule
    def _queries_are_pairs(self) -> Iterator[Problem]:
        if self.mqar_num_queries > self.mqar_num_pairs:
            rule = f"exceeds .mqar_num_pairs = {self.mqar_num_pairs}"
            yield Problem("mqar_num_queries", self.mqar_num_queries, rule, "give fewer")
