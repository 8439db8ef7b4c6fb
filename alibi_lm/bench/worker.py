"""A process of its own that measures something whenever it is asked to.

So each has its own memory, and several can take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Answers = Mapping[str, Callable[[], Any]]
"""What a worker can be asked for."""


class Worker:
    """A process that calls `serve(pipe, job)`, which should end with `answer`."""

    def __init__(self, name: str, serve: Callable[[Connection, Any], None], job: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, job), daemon=True)
        self._process.start()
        other.close()
        self.name = name

    def ask(self, what: str) -> Any:
        """One of its answers.

        Raises:
            RuntimeError: the process has ended.
        """
        try:
            self._pipe.send(what)
            return self._pipe.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._process.join()
            message = f"the process of {self.name} ended with {self._process.exitcode}"
            raise RuntimeError(message) from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def answer(pipe: Connection, answers: Answers) -> None:
    """Answer until the other side closes the pipe."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())
