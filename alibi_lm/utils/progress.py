"""A progress bar for text: MB done, MB/s, time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from alibi_lm.utils.logging import console

_LOG_SECONDS = 30.0


class Progress:
    """Bytes of text done: a bar on a terminal, elsewhere a log line every half minute."""

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        """Start at `done` bytes.

        Args:
            title: what is being done.
            total: bytes in all; None if unknown, which leaves out the ETA.
            done: bytes that an earlier process did; they do not count in the speed.
        """
        self._title = title
        self._total = total
        self._start = self._logged = time.monotonic()
        self._before = self._done = done
        self._bar = tqdm(
            desc=title,
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            disable=console.muted or not sys.stderr.isatty(),
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
        """Count `num_bytes` more as done."""
        self._done += num_bytes
        self._bar.update(num_bytes)
        now = time.monotonic()
        if self._bar.disable and now - self._logged >= _LOG_SECONDS:
            self._logged = now
            console.info(self._line(now - self._start))

    def _line(self, seconds: float) -> str:
        return str(
            tqdm.format_meter(
                n=self._done,
                total=self._total,
                elapsed=seconds,
                initial=self._before,
                prefix=self._title,
                unit="B",
                unit_scale=True,
                ncols=0,
            )
        )

    def summary(self) -> str:
        """What was done and how fast, for one line."""
        seconds = time.monotonic() - self._start
        megabytes = (self._done - self._before) / 1e6
        speed = megabytes / max(seconds, 1e-9)
        return f"{megabytes:.1f} MB in {seconds:.1f} s, {speed:.1f} MB/s"
