"""Work counted in lines of the library that run, so that no clock is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARY = str(Path(__file__).resolve().parents[2] / "alibi_lm")


def lines_run(action: Callable[[], object]) -> int:
    """Lines of the library that run in `action`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
