"""The one place of the library that prints."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_RED, _YELLOW = 31, 33


class Console:
    """Writes lines to the terminal and, once a log file is set, to it as well.

    A muted console (every rank but 0) writes nothing, so callers need not ask for their rank. With
    `colored` the words `error` and `warning` have a color, on a terminal only.
    """

    def __init__(self) -> None:
        self.muted = False
        self.colored = False
        self._log: TextIO | None = None

    def log_to(self, path: Path) -> None:
        """Append every further line to `path`. A muted console ignores this."""
        if self.muted:
            return
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Stop writing to the log file."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def info(self, text: str) -> None:
        """Write one line for the user to standard output."""
        self._write(text, text, sys.stdout)

    def write(self, text: str) -> None:
        """Write text as it is to standard output at once, without a line's end."""
        if not self.muted:
            print(text, end="", flush=True)

    def warn(self, text: str) -> None:
        """Write one warning line to standard error."""
        shown = f"{self._marked('warning:', _YELLOW, sys.stderr)} {text}"
        self._write(f"warning: {text}", shown, sys.stderr)

    def error(self, text: str) -> None:
        """Write one error line to standard error; to the log too, unless its disk is the error."""
        if self.muted:
            return
        self._show(f"{self._marked('error:', _RED, sys.stderr)} {text}", sys.stderr)
        if self._log is not None:
            with suppress(OSError):
                print(f"error: {text}", file=self._log, flush=True)

    def _marked(self, word: str, color: int, stream: TextIO) -> str:
        return f"\x1b[{color}m{word}\x1b[0m" if self.colored and stream.isatty() else word

    def _write(self, text: str, shown: str, stream: TextIO) -> None:
        if self.muted:
            return
        if self._log is not None:
            print(text, file=self._log, flush=True)
        self._show(shown, stream)

    def _show(self, text: str, stream: TextIO) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:
            if self._log is None:
                raise
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let a stream that nobody reads any more lead nowhere: the log has its lines."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


console = Console()
