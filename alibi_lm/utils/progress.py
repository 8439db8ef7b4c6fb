"""Progress of long work: how much is done, how fast, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from alibi_lm.utils.logging import console

_LOG_SECONDS = 30.0


class Progress:
    """A bar on a terminal, elsewhere a log line every half minute."""

    def __init__(
        self,
        title: str,
        total: int | None,
        done: int = 0,
        unit: str = "B",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at `done`.

        Args:
            title: what is being done.
            total: bytes, or other units, in all; None if unknown, which leaves out the ETA.
            done: what an earlier process did; it does not count in the speed.
            unit: what is counted: `B` for bytes, `tok` for tokens.
            clock: seconds, for the lines of the log.
        """
        self._title = title
        self._total = total
        self._unit, self._clock = unit, clock
        self._start = self._logged = clock()
        self._before = self._done = done
        self._bar = tqdm(
            desc=title,
            total=total,
            initial=done,
            unit=unit,
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

    def advance(self, count: int) -> None:
        """Count so much more as done."""
        self._done += count
        self._bar.update(count)
        now = self._clock()
        if self._bar.disable and now - self._logged >= _LOG_SECONDS:
            self._logged = now
            console.info(self._line(now - self._start))

    def skip(self, count: int) -> None:
        """Count what an earlier process did."""
        self._before += count
        self._done += count
        if not self._bar.disable:
            self._bar.initial += count
            self._bar.update(count)

    def _line(self, seconds: float) -> str:
        return str(
            tqdm.format_meter(
                n=self._done,
                total=self._total,
                elapsed=seconds,
                initial=self._before,
                prefix=self._title,
                unit=self._unit,
                unit_scale=True,
                ncols=0,
            )
        )

    def summary(self) -> str:
        """How many bytes were done and how fast, for one line."""
        seconds = self._clock() - self._start
        megabytes = (self._done - self._before) / 1e6
        speed = megabytes / max(seconds, 1e-9)
        return f"{megabytes:.1f} MB in {seconds:.1f} s, {speed:.1f} MB/s"
