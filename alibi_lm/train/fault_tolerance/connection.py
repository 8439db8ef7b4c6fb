"""Short JSON messages between rank 0 and another rank, over a TCP connection.

torch's TCPStore does not serve here: its clients neither learn that a peer's process has ended,
which distinguishes a dead rank from a slow one within seconds, nor reconnect.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_LONGEST = 1 << 16
"""Longest message in bytes; no rank sends as much."""


def listen() -> socket.socket:
    """A socket that listens on a free port of all of this host's addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Connection:
    """One connection. A network failure raises OSError, a closed connection ConnectionError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._ended = False

    @classmethod
    def connect(cls, address: str, port: int, seconds: float) -> Connection:
        """Connect within `seconds`.

        Raises:
            OSError: nothing listens there, or it cannot be reached.
        """
        return cls(socket.create_connection((address, port), timeout=seconds))

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for sending, without waiting for its delivery."""
        data = json.dumps(message).encode() + b"\n"
        # The send buffer holds thousands of messages; if it is full the connection is dead.
        if self._socket.send(data) != len(data):
            raise ConnectionError("the send buffer is full")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived since the last call, perhaps none.

        If the connection was closed, what came before is returned first; the next call raises.
        """
        if self._ended:
            raise ConnectionError("the other side has closed the connection")
        while len(self._rest) <= _LONGEST:
            try:
                data = self._socket.recv(_LONGEST)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ConnectionError("not a message")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise ConnectionError("not a message") from None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
