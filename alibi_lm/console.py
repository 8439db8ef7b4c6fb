"""The one place of the library that prints."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class Console:
    """Writes lines to the terminal and, once a log file is set, to it as well.

    A muted console (every rank but 0) writes nothing, so callers need not ask for their rank.
    """

    def __init__(self) -> None:
        self.muted = False
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

    def say(self, text: str) -> None:
        """Write one line for the user to standard output."""
        self._write(text, sys.stdout)

    def warn(self, text: str) -> None:
        """Write one warning line to standard error."""
        self._write(f"warning: {text}", sys.stderr)

    def error(self, text: str) -> None:
        """Write one error line to standard error; to the log too, unless its disk is the error."""
        log, self._log = self._log, None
        self._write(f"error: {text}", sys.stderr)
        self._log = log
        if log is not None and not self.muted:
            with suppress(OSError):
                print(f"error: {text}", file=log, flush=True)

    def _write(self, text: str, stream: TextIO) -> None:
        if self.muted:
            return
        print(text, file=stream, flush=True)
        if self._log is not None:
            print(text, file=self._log, flush=True)


console = Console()
