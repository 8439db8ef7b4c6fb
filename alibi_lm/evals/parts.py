"""Parts of an eval, kept as they are finished: an interrupted eval resumes with the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alibi_lm.parallel.errors import run_on_rank0
from alibi_lm.utils.errors import UserInterrupt
from alibi_lm.utils.files import json_text, stored_object, write_text
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress


@dataclass(frozen=True)
class Part:
    """What came of a part."""

    value: Any
    """A JSON value."""
    seconds: float
    """Time that it took, in whichever process computed it."""


class Parts:
    """The parts of an eval, in a file beside its result; rank 0 reads and writes it.

    As a context it adds to Ctrl-C what is kept.
    """

    def __init__(
        self, name: str = "", total: int = 0, path: Path | None = None, key: str = ""
    ) -> None:
        """Take up the finished parts, if the file is of the same eval.

        Args:
            name: the eval's.
            total: its number of parts.
            path: the file; None keeps nothing.
            key: what the parts depend on; those of another key are dropped.
        """
        self._name, self._total, self._path, self._key = name, total, path, key
        self._parts: dict[str, Any] = run_on_rank0(self._read) if path else {}
        if self._parts:
            console.info(f"{name}: resuming with {len(self._parts)} of {total} parts from {path}")

    def _read(self) -> dict[str, Any]:
        stored = stored_object(self._path) if self._path else None
        return stored["parts"] if stored is not None and stored.get("key") == self._key else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            kept = "no part was finished, nothing is kept"
            if self._parts:
                kept = (
                    f"{self._name} keeps {len(self._parts)} of {self._total} parts in {self._path};"
                    " run the same command to resume"
                )
            raise UserInterrupt(f"interrupted: {kept}") from None

    def run(self, name: str, compute: Callable[[], Any], progress: Progress, size: int) -> Part:
        """A part's value: what is kept, or what `compute` returns on every rank.

        Args:
            name: of the part.
            compute: returns the same JSON value on all ranks, and advances `progress` by `size`.
            progress: skips `size` where the part is kept.
            size: work in the part, in the unit of `progress`.
        """
        if name in self._parts:
            progress.skip(size)
        else:
            started = time.perf_counter()
            part = {"value": compute(), "seconds": time.perf_counter() - started}
            if self._path is None:
                return Part(**part)
            self._parts = run_on_rank0(lambda: self._with(name, part))
            if name not in self._parts:
                return Part(**part)
        return Part(**self._parts[name])

    def _with(self, name: str, part: dict[str, Any]) -> dict[str, Any]:
        """All parts, with one more in the file too."""
        assert self._path is not None
        parts = {**self._parts, name: part}
        try:
            text = json_text({"key": self._key, "parts": parts})
        except ValueError:  # not finite, which the eval reports itself
            return self._parts
        write_text(self._path, text)
        return parts
