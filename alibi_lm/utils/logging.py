"""The library's logger: lines for the user on the terminal and in a run's train.log.

A program that uses the library can add handlers to `logging.getLogger("alibi_lm")`, which gets
every record too. Nothing else in the library prints.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

_LABELS = {logging.WARNING: "warning:", logging.ERROR: "error:"}
_COLORS = {logging.WARNING: 33, logging.ERROR: 31}


class Console(logging.Logger):
    """Writes to the terminal and, after `log_to`, to a file.

    Attributes:
        muted: drop everything; set on every rank but 0, so callers need not ask for their rank.
        colored: whether `error:` and `warning:` have a color on a terminal.
    """

    def __init__(self) -> None:
        super().__init__("alibi_lm", logging.INFO)
        self.parent = logging.getLogger("alibi_lm")
        self.parent.propagate = False  # a handler of the root would print every line again
        self.muted = self.colored = False
        self._file: _LogFile | None = None
        self.addFilter(lambda record: not self.muted)
        self.addHandler(_Terminal(self))

    def log_to(self, path: Path) -> None:
        """Append all further lines to `path`, each with its time. Does nothing while muted."""
        if self.muted:
            return
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _LogFile(path)
        self.handlers.insert(0, self._file)  # before the terminal, which may be gone

    @property
    def has_file(self) -> bool:
        """Whether lines go to a file too."""
        return self._file is not None

    def close(self) -> None:
        """Stop writing to the file."""
        if self._file is not None:
            self.removeHandler(self._file)
            self._file.close()
            self._file = None

    def write(self, text: str) -> None:
        """Write text to standard output at once, without a newline."""
        if not self.muted:
            print(text, end="", flush=True)


class _Terminal(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        label = _LABELS.get(record.levelno, "")
        if label and self._console.colored and stream.isatty():
            label = f"\x1b[{_COLORS[record.levelno]}m{label}\x1b[0m"
        try:
            print(*filter(None, [label, record.getMessage()]), file=stream, flush=True)
        except BrokenPipeError:
            if not self._console.has_file:
                raise
            # Nobody reads the stream any more, and the file has the lines: discard the rest.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class _LogFile(logging.FileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return " ".join(filter(None, [moment, _LABELS.get(record.levelno), record.getMessage()]))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let a full disk end the run, unless the line is the report of that very error."""
        if record.levelno < logging.ERROR:
            raise


console = Console()
