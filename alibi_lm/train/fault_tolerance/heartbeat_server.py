"""The watchdog's threads: rank 0's, which judges, and the other ranks', which report to it."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from alibi_lm.train.fault_tolerance.connection import Connection
from alibi_lm.train.fault_tolerance.failure_detector import (
    DIED,
    GRACE,
    FailureDetector,
    Heartbeat,
    Limits,
    Verdict,
    lost_line,
    silence,
)
from alibi_lm.train.fault_tolerance.heartbeat import Progress
from alibi_lm.utils.errors import EXIT_LOST
from alibi_lm.utils.logging import console

INTERVAL = 1.0
"""Seconds between signs of life."""

End = Callable[[Verdict, bool], None]
"""Ends the process; the second argument says whether this rank writes the line."""


class HeartbeatThread(threading.Thread, ABC):
    """A rank's thread; a daemon, so that it never keeps a process alive."""

    def __init__(self, progress: Progress, end: End) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._progress = progress
        self._end = end
        self._last_words: Heartbeat | None = None
        self._stopping = threading.Event()

    def stop(self, exit_reason: Heartbeat | None, seconds: float) -> None:
        """Stop watching: the rank has done its work or, with last words, leaves by an error."""
        self._last_words = exit_reason
        self._stopping.set()
        self.join(seconds)

    def run(self) -> None:
        """Watch until told to stop."""
        try:
            self.watch()
        except Exception as failure:  # a defect here must not end a job that is well
            console.muted = False
            console.warning(f"the watchdog has stopped: {type(failure).__name__}: {failure}")
            self.abandon()
        finally:
            self.close()

    @abstractmethod
    def watch(self) -> None:
        """The thread's loop."""

    def abandon(self) -> None:
        """Take leave after a defect of the watchdog's own."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def beat(self) -> Heartbeat:
        """This rank's sign of life now."""
        progress = self._progress
        words = self._last_words or Heartbeat()
        return Heartbeat(
            progress.step, progress.doing, progress.count(), progress.warm, progress.failed,
            words.left, words.why,
        )  # fmt: skip


class HeartbeatServer(HeartbeatThread):
    """Rank 0's: hears all, judges, and tells all."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        hosts: Sequence[str],
        limits: Limits,
        progress: Progress,
        end: End,
    ) -> None:
        super().__init__(progress, end)
        self._listener = listener
        self._listener.setblocking(False)
        self._token = token
        self._judge = FailureDetector(hosts, limits)
        self._links: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def watch(self) -> None:
        """Hear and judge until every other rank has stopped too."""
        last = time.monotonic()
        while True:
            for key, _ in self._selector.select(INTERVAL / 4):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            if self._stopping.is_set() and self._finished():
                return
            now = time.monotonic()
            if now - last >= INTERVAL:
                # A pause of this process is no silence of the others.
                seconds, last = min(now - last, 2 * INTERVAL), now
                self._judge.heard(0, self.beat())
                self._tell({})
                verdict = self._judge.tick(seconds, self._progress.saved)
                if verdict is not None:
                    self._tell(dataclasses.asdict(verdict))
                    time.sleep(INTERVAL / 4)  # let it leave before the connections break
                    self._end(verdict, True)
                    return

    def _finished(self) -> bool:
        words = self._last_words
        if words is None:
            self._judge.stopped(0)
            return self._judge.all_stopped(but=0)
        self._judge.heard(0, self.beat())
        verdict = self._judge.left(self._progress.saved, grace=0.0)
        assert verdict is not None
        self._tell(dataclasses.asdict(verdict))
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(
                connection, selectors.EVENT_READ, [Connection(connection), None]
            )

    def _hear(self, entry: list[Any]) -> None:
        """Take what one connection has brought; entry is the link and, once known, its rank."""
        link, rank = entry
        try:
            for message in link.receive():
                if rank is None:
                    rank = entry[1] = self._introduced(link, message)
                elif message.get("stopped"):
                    self._judge.stopped(rank)
                    link.send({"noted": True})
                else:
                    self._judge.heard(rank, Heartbeat(**message))
                    if message["left"] is not None:
                        link.send({"noted": True})
        except (OSError, TypeError, KeyError):
            self._selector.unregister(link)
            link.close()
            if rank is not None and self._links.get(rank) is link:
                del self._links[rank]
                self._judge.closed(rank)

    def _introduced(self, link: Connection, message: dict[str, Any]) -> int:
        if message["token"] != self._token:
            raise ConnectionError("not of this job")
        rank = int(message["rank"])
        self._links[rank] = link
        return rank

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            with suppress(OSError):  # a dead connection shows when it is read
                link.send(message)

    def close(self) -> None:
        """Let all connections go; a rank that is still watching must not take it for a death."""
        self._tell({"over": True})
        for link in self._links.values():
            link.close()
        self._listener.close()


class HeartbeatClient(HeartbeatThread):
    """Another rank's: tells rank 0 that it lives, and hears the verdict."""

    def __init__(
        self,
        rank: int,
        place: tuple[str, int, str],
        link: Connection,
        hosts: Sequence[str],
        pids: Sequence[int],
        limits: Limits,
        progress: Progress,
        end: End,
    ) -> None:
        """`place` is rank 0's address, port and the job's token."""
        super().__init__(progress, end)
        self._rank = rank
        self._place = place
        self._link: Connection | None = link
        self._hosts = hosts
        self._pids = pids
        self._limits = limits

    def watch(self) -> None:
        """Report and listen until told to stop, by the main thread or by rank 0."""
        last, silent, closed = time.monotonic(), 0.0, 0.0
        while not self._stopping.is_set():
            messages = self._exchange(self._as_message())
            for message in messages:
                if "code" in message:
                    self._end(Verdict(**message), False)
                    return
                if "over" in message:
                    return
            now = time.monotonic()
            seconds, last = min(now - last, 2 * INTERVAL), now
            silent = 0.0 if messages else silent + seconds
            closed = closed + seconds if self._link is None else 0.0
            if self._link is None and closed >= GRACE:
                self._rank_0_lost(DIED)
                return
            if self._limits.silence is not None and silent >= self._limits.silence:
                self._rank_0_lost(silence(silent))
                return
        self._say_goodbye()

    def _as_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self.beat())

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message and hear what has come an interval later; mend a broken link."""
        try:
            if self._link is None:
                address, port, token = self._place
                self._link = Connection.connect(address, port, INTERVAL)
                self._link.send({"rank": self._rank, "token": token})
            self._link.send(message)
            self._stopping.wait(INTERVAL)
            return self._link.receive()
        except OSError:
            self.close()
            self._link = None
            self._stopping.wait(INTERVAL / 4)
            return []

    def _rank_0_lost(self, rule: str) -> None:
        """Rank 0 cannot say it: on each host the first rank that lives does."""
        progress = self._progress
        host = self._hosts[self._rank]
        before = [r for r in range(1, self._rank) if self._hosts[r] == host]
        speak = not any(_lives(self._pids[r]) for r in before)
        rule += f" while the job was at step {progress.step:,}"
        line = lost_line([0], self._hosts, rule, progress.saved)
        self._end(Verdict(EXIT_LOST, line), speak)

    def _say_goodbye(self) -> None:
        """Tell rank 0, and wait until it has heard: it would take the end for a death."""
        message = {"stopped": True} if self._last_words is None else self._as_message()
        heard = self._exchange(message)
        give_up = time.monotonic() + GRACE
        while self._link is not None and time.monotonic() < give_up:
            if any("noted" in told or "over" in told or "code" in told for told in heard):
                return
            time.sleep(INTERVAL / 50)
            try:
                heard = self._link.receive()
            except OSError:
                return

    def abandon(self) -> None:
        """Let rank 0 know that nothing more will be heard of this rank."""
        self._exchange({"stopped": True})

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()


def _lives(pid: int) -> bool:
    """Whether a process of this host is alive; a zombie is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
