"""Judging from the ranks' signs of life which rank is lost or stuck. No clock, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alibi_lm.train.fault_tolerance.heartbeat import ORDER, STARTING
from alibi_lm.utils.errors import EXIT_LOST, Problem

GRACE = 3.0
"""Seconds in which a broken connection may be made again."""
FAILED_SILENCE = 10.0
"""Seconds of silence that are enough once a collective has failed."""
FAILED_STUCK = 60.0
"""Seconds without progress that are enough once a collective has failed, by its own time limit."""
START_FACTOR = 3
"""How many times as long nothing may move before the first step of a start is done."""


DIED = "ended without a word (killed, or out of memory)"


def silence(seconds: float) -> str:
    """What is said of a rank that is not heard of."""
    return f"gave no sign of life for {seconds:.0f} s (stopped, or its host or network is down)"


@dataclass(frozen=True)
class Heartbeat:
    """A rank's sign of life."""

    step: int = 0
    doing: str = STARTING
    count: int = 0
    """Grows while the rank moves on."""
    warm: bool = False
    """Whether its first step since the start is done."""
    failed: str | None = None
    """What a collective of its said when it failed."""
    left: int | None = None
    """The exit code with which the rank leaves, of its own accord."""
    why: str = ""
    """The error that it leaves with, if that is one of the program."""


@dataclass(frozen=True)
class Verdict:
    """The end of the job: the exit code of the surviving ranks, and the line that says why."""

    code: int
    line: str | None
    """None where the rank that left has said it."""


@dataclass(frozen=True)
class Limits:
    """How long is too long."""

    silence: float | None
    """Seconds without a sign of life; None waits for ever."""
    stuck: float | None
    """Seconds in which no rank moves on; None waits for ever."""


class _Rank:
    def __init__(self) -> None:
        self.beat = Heartbeat()
        self.silent = 0.0
        self.still = 0.0
        self.closed: float | None = None
        """Seconds since its connection broke."""
        self.stopped = False
        """It has done its work, and may go."""


class FailureDetector:
    """Knows all ranks' last signs of life, and says when the job cannot go on."""

    def __init__(self, hosts: Sequence[str], limits: Limits) -> None:
        """`hosts` names each rank's host."""
        self.hosts = hosts
        self.limits = limits
        self.ranks = [_Rank() for _ in hosts]

    def heard(self, rank: int, beat: Heartbeat) -> None:
        """A sign of life has come."""
        state = self.ranks[rank]
        if beat.count != state.beat.count or beat.doing != state.beat.doing:
            state.still = 0.0
        state.beat, state.silent, state.closed = beat, 0.0, None

    def closed(self, rank: int) -> None:
        """The connection to a rank has broken: its process has ended, or the network has."""
        if self.ranks[rank].closed is None:
            self.ranks[rank].closed = 0.0

    def stopped(self, rank: int) -> None:
        """A rank has done its work."""
        self.ranks[rank].stopped = True

    def all_stopped(self, but: int) -> bool:
        """Whether every rank except one has done its work, or has gone."""
        others = (state for rank, state in enumerate(self.ranks) if rank != but)
        return all(state.stopped or state.closed is not None for state in others)

    def tick(self, seconds: float, saved: Path | None) -> Verdict | None:
        """Let time pass; the verdict if the job cannot go on. `saved` is the last checkpoint."""
        for _, state in self._watched():
            state.silent += seconds
            state.still += seconds
            if state.closed is not None:
                state.closed += seconds
        return self.left(saved, GRACE) or self._lost(saved) or self._stuck(saved)

    def left(self, saved: Path | None, grace: float) -> Verdict | None:
        """The verdict if ranks leave of their own accord while others go on.

        They have `grace` seconds to write their own line, or their traceback.
        """
        left = [rank for rank, state in self._watched() if state.beat.left is not None]
        if not left or max(self.ranks[rank].silent for rank in left) < grace:
            return None
        beat = self.ranks[left[0]].beat
        if not beat.why:
            assert beat.left is not None
            return Verdict(beat.left, None)
        rule = f"ended on an error of the program {_at(beat)}: {beat.why}"
        return self._verdict(left, rule, saved)

    def _lost(self, saved: Path | None) -> Verdict | None:
        gone = [r for r, state in self._watched() if state.closed and state.closed >= GRACE]
        if gone:
            rule = f"{DIED} while the job was at step {self._step():,}"
            return self._verdict(gone, rule, saved)
        limit = self.limits.silence
        if limit is None:
            return None
        if self._any_failed():
            limit = min(limit, FAILED_SILENCE)
        silent = [rank for rank, state in self._watched() if state.silent >= limit]
        if not silent:
            return None
        # The others of a host that has just gone are named too.
        silent = [r for r, state in self._watched() if state.silent >= limit * 0.75]
        first = self.ranks[silent[0]]
        rule = (
            f"{silence(first.silent)} while the job was at step {self._step():,}; "
            f"last heard of {_at(first.beat)}"
        )
        return self._verdict(silent, rule, saved)

    def _stuck(self, saved: Path | None) -> Verdict | None:
        limit = self.limits.stuck
        if limit is None:
            return None
        working = [(r, state) for r, state in self._watched() if state.beat.failed is None]
        if self._any_failed():
            limit = min(limit, FAILED_STUCK)
        elif not all(state.beat.warm for _, state in working):
            limit *= START_FACTOR
        if not working or min(state.still for _, state in working) < limit:
            return None
        furthest_back = min(_position(state.beat) for _, state in working)
        stuck = [rank for rank, state in working if _position(state.beat) == furthest_back]
        first = self.ranks[stuck[0]]
        who = "does" if len(stuck) == 1 else "do"
        rule = f"{who} not move on: still for {first.still:.0f} s {_at(first.beat)}"
        if len(stuck) < len(working):
            rule += "; the other ranks wait"
        return self._verdict(stuck, rule, saved)

    def _watched(self) -> list[tuple[int, _Rank]]:
        return [(rank, state) for rank, state in enumerate(self.ranks) if not state.stopped]

    def _step(self) -> int:
        return max(state.beat.step for state in self.ranks)

    def _any_failed(self) -> bool:
        return any(state.beat.failed for state in self.ranks)

    def _verdict(self, ranks: Sequence[int], rule: str, saved: Path | None) -> Verdict:
        return Verdict(EXIT_LOST, lost_line(ranks, self.hosts, rule, saved))


def lost_line(ranks: Sequence[int], hosts: Sequence[str], rule: str, saved: Path | None) -> str:
    """The one line on the end of a job: who, on which host, what happened, what to do."""
    fix = "the job ends; the same command "
    if saved is None:
        fix += "begins again, as there is no checkpoint yet"
    else:
        fix += f"goes on from the last checkpoint, {saved}"
    return str(Problem(_named(ranks, hosts), None, rule, fix))


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, own in by_host.items():
        word = "rank" if len(own) == 1 else "ranks"
        every = len(own) == hosts.count(host) and len(own) > 1
        parts.append(f"{word} {_listed(own)} on {host}{' (all of that host)' if every else ''}")
    more = f" and {len(parts) - 4} more hosts" if len(parts) > 4 else ""
    return ", ".join(parts[:4]) + more


def _listed(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return ", ".join(shown) + f" and {len(ranks) - 8} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _at(beat: Heartbeat) -> str:
    return f"at step {beat.step:,}, {beat.doing}"


def _position(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, ORDER.index(beat.doing)
