"""Ends a job in which a rank has died, lost its host or hangs, with one line that names it.

A thread of every rank sends rank 0 a heartbeat once a second: that it is alive, what it does and
whether it makes progress. It has a TCP connection of its own, independent of the collectives. Rank
0 decides (`FailureDetector`) and sends its verdict to all; each of the others detects for itself
that rank 0 is gone. A rank that gets a verdict ends its process at once, because its main thread
may hang in a collective.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from alibi_lm.parallel.process_group import gather, rank, world_size
from alibi_lm.train.fault_tolerance.connection import Connection, listen
from alibi_lm.train.fault_tolerance.failure_detector import GRACE, FailureVerdict, Heartbeat, Limits
from alibi_lm.train.fault_tolerance.heartbeat import ActivityTracker
from alibi_lm.train.fault_tolerance.heartbeat_server import (
    HeartbeatClient,
    HeartbeatServer,
    HeartbeatThread,
)
from alibi_lm.utils.errors import EXIT_INTERRUPTED, UserError
from alibi_lm.utils.exit import end_now
from alibi_lm.utils.logging import console

_CONNECT_SECONDS = 20.0
_STOP_SECONDS = 10.0
_WRITE_SECONDS = 5.0
_LINGER_SECONDS = 3.0


@contextmanager
def watched(address: str, limits: Limits, activity: ActivityTracker, log: Path) -> Iterator[None]:
    """Watch all ranks while the body runs; every rank enters it. `address` is rank 0's.

    The process ends inside with the verdict's code if a rank is lost. An error of the body is
    reported to the other ranks, so that they end too, and re-raised.
    """
    if world_size() == 1:
        yield
        return
    watcher = _start(
        address, limits, activity, Ending(log, 0.0 if rank() == 0 else _LINGER_SECONDS)
    )
    if watcher is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        if is_communication_failure(error):
            # Some rank is gone: once it is known which, the thread ends the process.
            activity.failed = " ".join(str(error).split())[:500]
            watcher.join((limits.heartbeat_timeout or 60.0) + 2 * GRACE)
        _send_exit_reason(watcher, error)
        raise
    watcher.stop(None, _STOP_SECONDS)


def is_communication_failure(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or the network, not of the program."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/transport" in text or "NCCL error" in text)


def _send_exit_reason(watcher: HeartbeatThread, error: BaseException) -> None:
    if isinstance(error, UserError) and error.raised_on_all_ranks:
        watcher.stop(None, _STOP_SECONDS)
    elif isinstance(error, UserError):
        watcher.stop(Heartbeat(exit_code=error.exit_code), _STOP_SECONDS)
    elif isinstance(error, KeyboardInterrupt):
        watcher.stop(Heartbeat(exit_code=EXIT_INTERRUPTED), _STOP_SECONDS)
    else:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        watcher.stop(Heartbeat(exit_code=1, error=text[:300]), _STOP_SECONDS)


@dataclass(frozen=True)
class Ending:
    """How a verdict ends this process."""

    log: Path
    """train.log, which gets the line too."""
    linger: float
    """Seconds to stay alive after printing, so that the host's other ranks do not print too."""

    def __call__(self, verdict: FailureVerdict, speak: bool) -> None:
        """End the process; `speak` is whether this rank prints the line."""
        if speak and verdict.line is not None:
            line = verdict.line
            # The terminal or the storage may be what failed: neither may hold up the exit.
            writer = threading.Thread(target=self._write, args=(line,), daemon=True)
            writer.start()
            writer.join(_WRITE_SECONDS)
            time.sleep(self.linger)
        end_now(verdict.code)

    def _write(self, line: str) -> None:
        if console.muted:
            console.muted = False
            if self.log.parent.is_dir():
                console.log_to(self.log)
        console.error(line)


def _start(
    address: str,
    limits: Limits,
    activity: ActivityTracker,
    end: Callable[[FailureVerdict, bool], None],
) -> HeartbeatThread | None:
    """Connect every rank with rank 0; None, with a warning, where that cannot be done."""
    listener = listen() if rank() == 0 else None
    port = None if listener is None else int(listener.getsockname()[1])
    own = {"host": socket.gethostname(), "pid": os.getpid(), "port": port}
    table = gather(own | {"token": secrets.token_hex(16)})
    token, connection, failure = table[0]["token"], None, None
    if listener is None:
        try:
            connection = Connection.connect(address, table[0]["port"], _CONNECT_SECONDS)
            connection.send({"rank": rank(), "token": token})
        except OSError as error:
            failure = f"rank {rank()} on {own['host']}: {error}"
    failures = [text for text in gather(failure) if text is not None]
    if failures:
        console.warning(
            "dead or hanging ranks will not be detected: rank 0 cannot be reached at "
            f"{address}:{table[0]['port']} by {len(failures)} ranks, first {failures[0]}"
        )
        for opened in (listener, connection):
            if opened is not None:
                opened.close()
        return None
    hosts = [str(entry["host"]) for entry in table]
    watcher: HeartbeatThread
    if listener is not None:
        watcher = HeartbeatServer(listener, token, hosts, limits, activity, end)
    else:
        assert connection is not None
        pids = [int(entry["pid"]) for entry in table]
        place = (address, int(table[0]["port"]), token)
        watcher = HeartbeatClient(rank(), place, connection, hosts, pids, limits, activity, end)
    watcher.start()
    return watcher
