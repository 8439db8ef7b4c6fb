"""Requests to stop: SIGTERM, SIGUSR1, a time limit, or a STOP file in the run folder.

A request only sets a flag; `train.loop` saves and returns. `utils.exit` describes the whole path.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"
_LOOK_EVERY = 1.0
"""Seconds between checks for the STOP file, which may be on slow storage."""


class Preemption:
    """Whether this rank has been asked to stop.

    The ranks exchange it with every step's loss, so that all stop after the same step.
    """

    def __init__(self, run: Path | None, max_minutes: float | None) -> None:
        """Handle the signals; `run` (rank 0 only) is where the STOP file may appear."""
        self.reason: str | None = None
        self._stop_file = None if run is None else run / STOP_FILE
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._looked = 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def asked(self) -> bool:
        """Whether to stop after the step in progress."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self.reason = self.reason or "train.max_minutes"
        if self._stop_file is not None and now - self._looked >= _LOOK_EVERY:
            self._looked = now
            if self._stop_file.exists():
                self.reason = self.reason or str(self._stop_file)
        return self.reason is not None

    def acknowledge(self) -> None:
        """Delete the STOP file once the checkpoint is written, so that the next start resumes."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)
