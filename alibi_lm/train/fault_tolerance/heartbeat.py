"""What a rank's main thread does, at which step, and whether it makes progress."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType

import psutil
import torch

from alibi_lm.model.layers import Block

STARTING = "starting"
READING = "reading data"
COMPUTING = "computing"
VALIDATING = "validating"
SAVING = "saving"
ORDER = (STARTING, READING, COMPUTING, VALIDATING, SAVING)
"""The phases of a step, in order: of two ranks, the one further back holds up the other."""

_FILE_BYTES = 1 << 20
"""Bytes read or written since the last heartbeat that count as progress."""
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")


class ActivityTracker:
    """Written by the main thread, read by the watchdog's."""

    def __init__(self) -> None:
        self.step = 0
        self.doing = STARTING
        self.warmed_up = False
        """Whether the first step since the start is done."""
        self.saved: Path | None = None
        """The newest complete checkpoint."""
        self.failed: str | None = None
        """The error of a collective that failed."""
        self._count = 0
        self._main = threading.get_ident()
        self._bytes = 0

    def at(self, doing: str, step: int) -> None:
        """Record that the main thread enters a phase of a step (the first is 1)."""
        if step > self.step > 0:
            self.warmed_up = True
        self.step, self.doing = step, doing
        self._count += 1

    def follow(self, model: torch.nn.Module) -> None:
        """Count every call of the model's blocks as progress: a step may take long."""
        for layer in model.modules():
            if isinstance(layer, Block):
                layer.register_forward_pre_hook(self._moved)

    def _moved(self, *_: object) -> None:
        self._count += 1

    def count(self) -> int:
        """A number that grows while the main thread works, and stands still when it is stuck.

        Reading or writing files counts as work, and a rank in a debugger is not stuck.
        """
        now = _file_bytes()
        if now - self._bytes >= _FILE_BYTES:
            self._bytes = now
            self._count += 1
        elif _in_debugger(sys._current_frames().get(self._main)):
            self._count += 1
        return self._count


def _file_bytes() -> int:
    """Bytes that this process has read and written so far, without sockets' send and recv."""
    try:
        counters = psutil.Process().io_counters()
    except (psutil.Error, OSError):  # some containers hide /proc/self/io
        return 0
    sizes = (counters.read_chars, counters.write_chars, counters.read_bytes, counters.write_bytes)
    return sum(sizes)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    try:
        status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return "TracerPid:\t0\n" not in status
