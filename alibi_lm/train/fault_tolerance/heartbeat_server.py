"""The watchdog's threads: rank 0's server, and the clients of the other ranks."""

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
    FailureVerdict,
    Heartbeat,
    Limits,
    lost_line,
    silence,
)
from alibi_lm.train.fault_tolerance.heartbeat import ActivityTracker
from alibi_lm.utils.errors import EXIT_LOST
from alibi_lm.utils.logging import console

INTERVAL = 1.0
"""Seconds between heartbeats."""

End = Callable[[FailureVerdict, bool], None]
"""Ends the process; the second argument is whether this rank prints the line."""


class HeartbeatThread(threading.Thread, ABC):
    """A rank's thread; a daemon, so that it never keeps a process alive."""

    def __init__(self, activity: ActivityTracker, end: End) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._activity = activity
        self._end = end
        self._exit_reason: Heartbeat | None = None
        self._stopping = threading.Event()

    def stop(self, exit_reason: Heartbeat | None, seconds: float) -> None:
        """Stop watching: the rank has finished its work or, with an exit reason, fails."""
        self._exit_reason = exit_reason
        self._stopping.set()
        self.join(seconds)

    def run(self) -> None:
        """Watch until `stop` is called."""
        try:
            self.watch()
        except Exception as failure:  # a defect here must not end a healthy job
            console.muted = False
            console.warning(f"the watchdog has stopped: {type(failure).__name__}: {failure}")
            self.abandon()
        finally:
            self.close()

    @abstractmethod
    def watch(self) -> None:
        """The thread's loop."""

    def abandon(self) -> None:
        """Stop taking part after a defect of the watchdog itself."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def heartbeat(self) -> Heartbeat:
        """This rank's heartbeat now."""
        activity = self._activity
        reason = self._exit_reason or Heartbeat()
        return Heartbeat(
            activity.step, activity.doing, activity.count(), activity.warmed_up, activity.failed,
            reason.exit_code, reason.error,
        )  # fmt: skip


class HeartbeatServer(HeartbeatThread):
    """Rank 0's thread: receives all heartbeats, detects failures and sends the verdict to all."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        hosts: Sequence[str],
        limits: Limits,
        activity: ActivityTracker,
        end: End,
    ) -> None:
        super().__init__(activity, end)
        self._listener = listener
        self._listener.setblocking(False)
        self._token = token
        self._detector = FailureDetector(hosts, limits)
        self._connections: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def watch(self) -> None:
        """Receive and check heartbeats until every other rank has stopped too."""
        last = time.monotonic()
        while True:
            for key, _ in self._selector.select(INTERVAL / 4):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            if self._stopping.is_set() and self._finished():
                return
            now = time.monotonic()
            if now - last >= INTERVAL:
                # A pause of this process must not count against the others.
                seconds, last = min(now - last, 2 * INTERVAL), now
                self._detector.heard(0, self.heartbeat())
                self._send_to_all({})
                verdict = self._detector.tick(seconds, self._activity.saved)
                if verdict is not None:
                    self._send_to_all(dataclasses.asdict(verdict))
                    time.sleep(INTERVAL / 4)  # let it arrive before the connections break
                    self._end(verdict, True)
                    return

    def _finished(self) -> bool:
        reason = self._exit_reason
        if reason is None:
            self._detector.stopped(0)
            return self._detector.all_stopped(but=0)
        self._detector.heard(0, self.heartbeat())
        verdict = self._detector.left(self._activity.saved, grace=0.0)
        assert verdict is not None
        self._send_to_all(dataclasses.asdict(verdict))
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(
                connection, selectors.EVENT_READ, [Connection(connection), None]
            )

    def _receive(self, entry: list[Any]) -> None:
        """Handle a connection's messages; `entry` is the connection and its rank, once known."""
        connection, rank = entry
        try:
            for message in connection.receive():
                if rank is None:
                    rank = entry[1] = self._introduced(connection, message)
                elif message.get("stopped"):
                    self._detector.stopped(rank)
                    connection.send({"acknowledged": True})
                else:
                    self._detector.heard(rank, Heartbeat(**message))
                    if message["exit_code"] is not None:
                        connection.send({"acknowledged": True})
        except (OSError, TypeError, KeyError):
            self._selector.unregister(connection)
            connection.close()
            if rank is not None and self._connections.get(rank) is connection:
                del self._connections[rank]
                self._detector.closed(rank)

    def _introduced(self, connection: Connection, message: dict[str, Any]) -> int:
        if message["token"] != self._token:
            raise ConnectionError("not of this job")
        rank = int(message["rank"])
        self._connections[rank] = connection
        return rank

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            with suppress(OSError):  # reading will show that the connection is dead
                connection.send(message)

    def close(self) -> None:
        """Close all connections; a rank that still watches must not take that for a death."""
        self._send_to_all({"over": True})
        for connection in self._connections.values():
            connection.close()
        self._listener.close()


class HeartbeatClient(HeartbeatThread):
    """The thread of any other rank: sends its heartbeat to rank 0 and receives the verdict."""

    def __init__(
        self,
        rank: int,
        place: tuple[str, int, str],
        connection: Connection,
        hosts: Sequence[str],
        pids: Sequence[int],
        limits: Limits,
        activity: ActivityTracker,
        end: End,
    ) -> None:
        """`place` is rank 0's address, port and the job's token."""
        super().__init__(activity, end)
        self._rank = rank
        self._place = place
        self._connection: Connection | None = connection
        self._hosts = hosts
        self._pids = pids
        self._limits = limits

    def watch(self) -> None:
        """Report and listen until the main thread or rank 0 says to stop."""
        last, silent, closed = time.monotonic(), 0.0, 0.0
        while not self._stopping.is_set():
            messages = self._exchange(self._as_message())
            for message in messages:
                if "code" in message:
                    self._end(FailureVerdict(**message), False)
                    return
                if "over" in message:
                    return
            now = time.monotonic()
            seconds, last = min(now - last, 2 * INTERVAL), now
            silent = 0.0 if messages else silent + seconds
            closed = closed + seconds if self._connection is None else 0.0
            if self._connection is None and closed >= GRACE:
                self._rank_0_lost(DIED)
                return
            if (
                self._limits.heartbeat_timeout is not None
                and silent >= self._limits.heartbeat_timeout
            ):
                self._rank_0_lost(silence(silent))
                return
        self._report_exit()

    def _as_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self.heartbeat())

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message, wait an interval, return what has arrived; reconnect if needed."""
        try:
            if self._connection is None:
                address, port, token = self._place
                self._connection = Connection.connect(address, port, INTERVAL)
                self._connection.send({"rank": self._rank, "token": token})
            self._connection.send(message)
            self._stopping.wait(INTERVAL)
            return self._connection.receive()
        except OSError:
            self.close()
            self._connection = None
            self._stopping.wait(INTERVAL / 4)
            return []

    def _rank_0_lost(self, rule: str) -> None:
        """End the job: on each host, the first rank that is alive prints the line."""
        activity = self._activity
        host = self._hosts[self._rank]
        before = [r for r in range(1, self._rank) if self._hosts[r] == host]
        speak = not any(_is_alive(self._pids[r]) for r in before)
        rule += f" while the job was at step {activity.step:,}"
        line = lost_line([0], self._hosts, rule, activity.saved)
        self._end(FailureVerdict(EXIT_LOST, line), speak)

    def _report_exit(self) -> None:
        """Tell rank 0 and wait for its answer, or it would take the exit for a death."""
        message = {"stopped": True} if self._exit_reason is None else self._as_message()
        answers = self._exchange(message)
        give_up = time.monotonic() + GRACE
        while self._connection is not None and time.monotonic() < give_up:
            if any(
                "acknowledged" in answer or "over" in answer or "code" in answer
                for answer in answers
            ):
                return
            time.sleep(INTERVAL / 50)
            try:
                answers = self._connection.receive()
            except OSError:
                return

    def abandon(self) -> None:
        """Tell rank 0 not to expect further heartbeats of this rank."""
        self._exchange({"stopped": True})

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _is_alive(pid: int) -> bool:
    """Whether a process of this host is alive; a zombie is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
