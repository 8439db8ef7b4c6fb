"""Decides from the ranks' heartbeats which rank is lost or stuck. No clock, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alibi_lm.train.fault_tolerance.heartbeat import ORDER, STARTING
from alibi_lm.utils.errors import EXIT_LOST, Problem

GRACE = 3.0
"""Seconds in which a rank may reconnect."""
FAILED_SILENCE = 10.0
"""Seconds without a heartbeat that suffice once a collective has failed."""
FAILED_STUCK = 60.0
"""Seconds without progress that suffice once a collective has failed by its own timeout."""
START_FACTOR = 3
"""Factor on the time without progress until the first step after a start is done."""


DIED = "died without an error (killed, or out of memory)"


def silence(seconds: float) -> str:
    """Message for a rank whose heartbeats stopped."""
    return f"sent no heartbeat for {seconds:.0f} s (stopped, or its host or network is down)"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports once a second."""

    step: int = 0
    doing: str = STARTING
    progress_count: int = 0
    """Grows while the rank makes progress."""
    warmed_up: bool = False
    """Whether its first step since the start is done."""
    failed: str | None = None
    """The error of a collective that failed on this rank."""
    exit_code: int | None = None
    """The exit code of a rank that is about to exit on an error of its own."""
    error: str = ""
    """That error, if it is a defect and not a user error."""


@dataclass(frozen=True)
class FailureVerdict:
    """The end of the job: the exit code of the surviving ranks, and the line that explains it."""

    code: int
    line: str | None
    """None if the failed rank has printed its own."""


@dataclass(frozen=True)
class Limits:
    """How long is too long."""

    heartbeat_timeout: float | None
    """Seconds without a heartbeat; None waits forever."""
    hang_timeout: float | None
    """Seconds in which no rank makes progress; None waits forever."""


class _Rank:
    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.silent = 0.0
        self.still = 0.0
        self.closed: float | None = None
        """Seconds since its connection broke."""
        self.stopped = False
        """It has finished its work."""


class FailureDetector:
    """Keeps all ranks' last heartbeats, and decides when the job cannot continue."""

    def __init__(self, hosts: Sequence[str], limits: Limits) -> None:
        """`hosts` names each rank's host."""
        self.hosts = hosts
        self.limits = limits
        self.ranks = [_Rank() for _ in hosts]

    def heard(self, rank: int, heartbeat: Heartbeat) -> None:
        """Record a heartbeat."""
        state = self.ranks[rank]
        before = state.heartbeat
        if (heartbeat.progress_count, heartbeat.doing) != (before.progress_count, before.doing):
            state.still = 0.0
        state.heartbeat, state.silent, state.closed = heartbeat, 0.0, None

    def closed(self, rank: int) -> None:
        """Record that the connection to a rank broke: its process ended, or the network failed."""
        if self.ranks[rank].closed is None:
            self.ranks[rank].closed = 0.0

    def stopped(self, rank: int) -> None:
        """Record that a rank has finished its work."""
        self.ranks[rank].stopped = True

    def all_stopped(self, but: int) -> bool:
        """Whether every rank except `but` has finished its work or is gone."""
        others = (state for rank, state in enumerate(self.ranks) if rank != but)
        return all(state.stopped or state.closed is not None for state in others)

    def tick(self, seconds: float, saved: Path | None) -> FailureVerdict | None:
        """Advance time; the verdict if the job cannot continue. `saved` is the last checkpoint."""
        for _, state in self._watched():
            state.silent += seconds
            state.still += seconds
            if state.closed is not None:
                state.closed += seconds
        return self.left(saved, GRACE) or self._lost(saved) or self._stuck(saved)

    def left(self, saved: Path | None, grace: float) -> FailureVerdict | None:
        """The verdict if ranks exit on their own errors while others run.

        They have `grace` seconds to print their own line or traceback.
        """
        left = [rank for rank, state in self._watched() if state.heartbeat.exit_code is not None]
        if not left or max(self.ranks[rank].silent for rank in left) < grace:
            return None
        heartbeat = self.ranks[left[0]].heartbeat
        if not heartbeat.error:
            assert heartbeat.exit_code is not None
            return FailureVerdict(heartbeat.exit_code, None)
        rule = f"failed with a defect {_at(heartbeat)}: {heartbeat.error}"
        return self._verdict(left, rule, saved)

    def _lost(self, saved: Path | None) -> FailureVerdict | None:
        gone = [r for r, state in self._watched() if state.closed and state.closed >= GRACE]
        if gone:
            rule = f"{DIED} while the job was at step {self._step():,}"
            return self._verdict(gone, rule, saved)
        limit = self.limits.heartbeat_timeout
        if limit is None:
            return None
        if self._any_failed():
            limit = min(limit, FAILED_SILENCE)
        silent = [rank for rank, state in self._watched() if state.silent >= limit]
        if not silent:
            return None
        # The other ranks of a lost host are about to exceed the limit: name them too.
        silent = [r for r, state in self._watched() if state.silent >= limit * 0.75]
        first = self.ranks[silent[0]]
        rule = (
            f"{silence(first.silent)} while the job was at step {self._step():,}; "
            f"last seen {_at(first.heartbeat)}"
        )
        return self._verdict(silent, rule, saved)

    def _stuck(self, saved: Path | None) -> FailureVerdict | None:
        limit = self.limits.hang_timeout
        if limit is None:
            return None
        working = [(r, state) for r, state in self._watched() if state.heartbeat.failed is None]
        if self._any_failed():
            limit = min(limit, FAILED_STUCK)
        elif not all(state.heartbeat.warmed_up for _, state in working):
            limit *= START_FACTOR
        if not working or min(state.still for _, state in working) < limit:
            return None
        furthest_back = min(_position(state.heartbeat) for _, state in working)
        stuck = [rank for rank, state in working if _position(state.heartbeat) == furthest_back]
        first = self.ranks[stuck[0]]
        verb = "makes" if len(stuck) == 1 else "make"
        rule = f"{verb} no progress: stuck for {first.still:.0f} s {_at(first.heartbeat)}"
        if len(stuck) < len(working):
            rule += "; the other ranks wait"
        return self._verdict(stuck, rule, saved)

    def _watched(self) -> list[tuple[int, _Rank]]:
        return [(rank, state) for rank, state in enumerate(self.ranks) if not state.stopped]

    def _step(self) -> int:
        return max(state.heartbeat.step for state in self.ranks)

    def _any_failed(self) -> bool:
        return any(state.heartbeat.failed for state in self.ranks)

    def _verdict(self, ranks: Sequence[int], rule: str, saved: Path | None) -> FailureVerdict:
        return FailureVerdict(EXIT_LOST, lost_line(ranks, self.hosts, rule, saved))


def lost_line(ranks: Sequence[int], hosts: Sequence[str], rule: str, saved: Path | None) -> str:
    """The line about the end of a job: which ranks, on which hosts, what happened, what to do."""
    fix = "the job ends; the same command "
    if saved is None:
        fix += "starts over, as there is no checkpoint yet"
    else:
        fix += f"resumes from the last checkpoint, {saved}"
    return str(Problem(_named(ranks, hosts), None, rule, fix))


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, members in by_host.items():
        word = "rank" if len(members) == 1 else "ranks"
        every = len(members) == hosts.count(host) and len(members) > 1
        parts.append(f"{word} {_listed(members)} on {host}{' (all of that host)' if every else ''}")
    more = f" and {len(parts) - 4} more hosts" if len(parts) > 4 else ""
    return ", ".join(parts[:4]) + more


def _listed(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return ", ".join(shown) + f" and {len(ranks) - 8} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _at(heartbeat: Heartbeat) -> str:
    return f"at step {heartbeat.step:,}, {heartbeat.doing}"


def _position(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.step, ORDER.index(heartbeat.doing)
