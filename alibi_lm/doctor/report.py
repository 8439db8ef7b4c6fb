"""What each host says of itself, as it travels between the hosts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Request:
    """What every host is asked."""

    token: str
    """Names this examination's files."""
    num_ranks: int
    """Ranks of the whole run."""
    config: str | None = None
    overrides: list[str] = field(default_factory=list)


@dataclass
class Report:
    """One host's answers."""

    hostname: str
    address: str | None
    """The first address that `hostname -I` names."""
    python: str
    versions: dict[str, str]
    """Of the packages that must be the same everywhere."""
    config: str | None = None
    """Digest of the resolved config."""
    data: str | None = None
    """Digest of the digests of token files and tokenizer."""
    run_folder: str | None = None
    """The run folder, or the nearest folder above it that exists."""
    needed_bytes: int | None = None
    """What the run's checkpoints will take."""
    free_bytes: int | None = None
    """Where they will lie."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with config, data or run folder, in the words of the program."""


@dataclass
class Meeting:
    """What one host says after all have met."""

    seen: list[str]
    """Hosts whose files in the run folder this host sees."""
    clock: float | None = None
    """Seconds that this host's clock is ahead of the first host's."""
    total: float | None = None
    """Sum over all hosts of 1, 2, ... ; None where the hosts could not meet."""
    bytes_per_second: float | None = None
    """Bandwidth of the all-reduce: 2 (n - 1) / n of its bytes a second."""
    backend: str = ""
    failure: str | None = None


def dump(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(asdict(value))


def last_json(text: str) -> dict[str, Any] | None:
    """The last line of an output that is a JSON object: login shells may greet before it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return None
