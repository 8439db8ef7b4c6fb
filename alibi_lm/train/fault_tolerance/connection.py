"""Short JSON messages between rank 0 and another rank, over a connection of their own."""

from __future__ import annotations

import json
import socket
from typing import Any

_LONGEST = 1 << 16
"""Bytes of a message at most; no rank sends as much."""


def listen() -> socket.socket:
    """A listening socket on a free port, for all of this host's addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Connection:
    """One connection. Every failure of the network is an OSError, its end a ConnectionError."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._ended = False

    @classmethod
    def connect(cls, address: str, port: int, seconds: float) -> Connection:
        """Connect within a time.

        Raises:
            OSError: nobody listens there, or it cannot be reached.
        """
        return cls(socket.create_connection((address, port), timeout=seconds))

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Hand a message to the network, without waiting for it to get anywhere."""
        data = json.dumps(message).encode() + b"\n"
        # The buffer of a connection holds thousands of these; a full one is a dead connection.
        if self._socket.send(data) != len(data):
            raise ConnectionError("the connection takes no more")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call; none is not an error.

        What came before the connection ended is returned first, its end raised by the next call.
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
