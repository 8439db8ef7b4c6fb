"""What the hosts report, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ProbeRequest:
    """What `probe` checks on every host."""

    token: str
    """Part of the names of this examination's marker files."""
    num_ranks: int
    """Ranks of the whole run."""
    config: str | None = None
    overrides: list[str] = field(default_factory=list)


@dataclass
class HostReport:
    """One host on its own."""

    hostname: str
    address: str | None
    """The first address of `hostname -I`."""
    python: str
    versions: dict[str, str]
    """Versions of the packages that must be the same everywhere."""
    gpus: list[str] = field(default_factory=list)
    """Names of the GPUs that training would use; none on a CPU."""
    config: str | None = None
    """Digest of the resolved config."""
    data: str | None = None
    """Digest of the digests of the token files and the tokenizer."""
    run_folder: str | None = None
    """The run folder, or its nearest parent that exists."""
    needed_bytes: int | None = None
    """Size of the run's checkpoints."""
    free_bytes: int | None = None
    """Free space in `run_folder`."""
    problems: list[str] = field(default_factory=list)
    """Messages about the config, the data or the run folder."""


@dataclass
class CollectiveReport:
    """One process of the all-reduce between hosts, or between processes of one host."""

    seen: list[str]
    """Hosts whose marker files this host sees in the run folder."""
    clock: float | None = None
    """Seconds by which this host's clock is ahead of the first host's."""
    total: float | None = None
    """Sum of 1, 2, ... over the processes; None if they could not connect."""
    num_processes: int = 1
    bytes_per_second: float | None = None
    """Bus bandwidth of the all-reduce: 2 (n - 1) / n of its bytes a second."""
    backend: str = ""
    failure: str | None = None


def dump(value: Any) -> str:
    """A dataclass as one line of JSON."""
    return json.dumps(asdict(value))


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: login shells may print a greeting before it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                content: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return content
    return None
