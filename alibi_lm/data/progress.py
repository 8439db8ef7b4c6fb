"""A progress bar for text: MB done, MB/s, time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from alibi_lm.console import console

_LOG_SECONDS = 30.0


class Progress:
    """Bytes of text done, on a terminal ten times a second, in a log every half minute."""

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        """
        Args:
            title: what is being done.
            total: bytes in all; None where that is not known, and then there is no ETA.
            done: bytes that an earlier process did.
        """
        self._title = title
        self._start = time.monotonic()
        self._done = 0
        self._bar = tqdm(
            desc=title,
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            disable=console.muted,
            mininterval=0.1 if sys.stderr.isatty() else _LOG_SECONDS,
            leave=False,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def advance(self, num_bytes: int) -> None:
        """Say that `num_bytes` more are done."""
        self._done += num_bytes
        self._bar.update(num_bytes)

    def summary(self) -> str:
        """What was done and how fast, for one line."""
        seconds = time.monotonic() - self._start
        speed = self._done / 1e6 / max(seconds, 1e-9)
        return f"{self._done / 1e6:.1f} MB in {seconds:.1f} s, {speed:.1f} MB/s"
