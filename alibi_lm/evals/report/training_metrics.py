"""Reading a run's metrics.jsonl and validation.jsonl back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alibi_lm.utils.errors import CheckpointError, Problem

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"


@dataclass(frozen=True)
class Point:
    """One logged step."""

    step: int
    loss: float
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class Metrics:
    """The log of a run; of a step logged twice (a resumed run) the last line counts."""

    points: list[Point]
    validations: dict[int, dict[int, float]]
    """step -> length -> loss"""

    @property
    def validation_lengths(self) -> list[int]:
        """Every length that was validated at, ascending."""
        return sorted({length for losses in self.validations.values() for length in losses})

    def validation(self, length: int) -> list[tuple[int, float]]:
        """(step, loss) of the validations at a length."""
        return [
            (step, losses[length])
            for step, losses in sorted(self.validations.items())
            if length in losses
        ]

    @property
    def training_seconds(self) -> float:
        """Time spent in optimizer steps, by the logged speeds: no set-up, no validation."""
        seconds, before = 0.0, 0
        for point in self.points:
            if point.tokens_per_second > 0:
                seconds += max(0, point.tokens - before) / point.tokens_per_second
            before = point.tokens
        return seconds


def read_metrics(run_folder: Path, last_step: int | None = None) -> Metrics | None:
    """The run's log up to `last_step`, or None where there is none.

    A last line that is cut short (the run was killed) is left out.

    Raises:
        CheckpointError: another line is not JSON.
    """
    points: dict[int, Point] = {}
    for row in _rows(run_folder / METRICS, last_step):
        if _is_number(row.get("loss")):
            points[row["step"]] = Point(
                row["step"], row["loss"], row.get("tokens", 0), row.get("tokens_per_second", 0.0)
            )
    if not points:
        return None
    validations = {
        row["step"]: {int(n): loss for n, loss in row["losses"].items() if _is_number(loss)}
        for row in _rows(run_folder / VALIDATION, last_step)
    }
    return Metrics([points[step] for step in sorted(points)], validations)


def _rows(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    """The lines of a log, up to a step."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            rule, fix = f"line {number} is not JSON", "take that line out"
            raise CheckpointError(Problem(str(path), None, rule, fix)) from None
        if last_step is None or row["step"] <= last_step:
            rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
