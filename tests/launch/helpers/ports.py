"""Ports for the ranks of tests, several of which may run at a time."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that Linux gives to connections, so that none of the many connections of other ranks
# takes a port between its choice and its use; each test process begins at another.
_FIRST, _COUNT = 20_000, 12_000
_offsets = itertools.count(os.getpid() * 61 % _COUNT)


def unused_port() -> int:
    """A TCP port that nothing listens on, another one at every call."""
    while True:
        port = _FIRST + next(_offsets) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
