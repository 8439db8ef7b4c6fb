"""Sizes of the retrieval tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from alibi_lm.utils.errors import Problem

QA = ("qa_1", "qa_2")
RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", *QA),
)
"""The thirteen columns of RULER's table, in its order."""
TASKS = ("passkey", "mqar", *RULER)


def default_tasks(num_qa_files: int) -> list[str]:
    """Every task that needs no file, and a qa task for each file."""
    return [name for name in TASKS if name not in QA[num_qa_files:]]


@dataclass
class TaskSizes:
    """Sizes of the retrieval tasks; left alone, RULER's are RULER's own.

    A model with a small tokenizer or a short training length needs smaller ones; results then say
    that the settings are not RULER's own.
    """

    tokens_to_generate: int | None = None
    """Answer's room of RULER's tasks, part of the length; by default RULER's: 128 in niah, 30 in
    vt, 120 in cwe, 50 in fwe, 32 in qa."""
    num_keys: int = 4
    """Keys of niah_multikey_1."""
    num_values: int = 4
    """Values of the key of niah_multivalue."""
    num_queries: int = 4
    """Keys asked for in niah_multiquery."""
    vt_num_chains: int = 1
    """Chains of assignments in vt; the first one is asked for."""
    vt_num_hops: int = 4
    """Assignments of a chain after its first."""
    vt_example_tokens: int = 500
    """Length of the solved example before vt's question; 0 leaves it out."""
    cwe_num_common: int = 10
    """Common words of cwe."""
    cwe_common_repeats: int | None = None
    """Times that a common word appears; by default RULER's: 30, or 6 at lengths below 4096."""
    cwe_uncommon_repeats: int | None = None
    """Times that another word appears; by default RULER's: 3, or 1 at lengths below 4096."""
    cwe_example: bool = True
    """Whether a solved example comes before cwe's question."""
    fwe_alpha: float = 2.0
    """Exponent of the zeta distribution of fwe's words."""
    fwe_num_words: int | None = None
    """Different words of fwe; by default RULER's: 1/50 of the prompt's tokens."""
    mqar_num_pairs: int = 8
    """Key-value pairs of mqar."""
    mqar_num_queries: int = 4
    """Keys asked for in mqar; the last one is scored."""
    passkey_num_distances: int = 8
    """Distances at which a passkey is put, evenly spaced, at every length."""

    def problems(self, key: str) -> Iterator[Problem]:
        """The rules of this section that are broken."""
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name == "vt_example_tokens":
                if value < 0:
                    yield Problem(f"{key}{name}", value, "is negative", "give 0 or more")
            elif name == "fwe_alpha":
                if not value > 1:
                    yield Problem(f"{key}{name}", value, "is not above 1", "give for example 2.0")
            elif name != "cwe_example" and value is not None and value < 1:
                yield Problem(f"{key}{name}", value, "is not positive", "give at least 1")
        if self.fwe_num_words is not None and 1 <= self.fwe_num_words < 4:
            rule = "is fewer than the dots and three words"
            yield Problem(f"{key}fwe_num_words", self.fwe_num_words, rule, "give at least 4")
        if self.mqar_num_pairs == 1 or self.mqar_num_pairs > 64:
            rule = "is not 2 to 64"
            yield Problem(f"{key}mqar_num_pairs", self.mqar_num_pairs, rule, "give for example 8")
        if self.mqar_num_queries > self.mqar_num_pairs:
            rule = f"is more than the {self.mqar_num_pairs} pairs"
            yield Problem(f"{key}mqar_num_queries", self.mqar_num_queries, rule, "give fewer")
