"""A run's log line, metrics.jsonl, validation.jsonl and metric writers. Rank 0 only."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from alibi_lm.train.engine.base import StepResult
from alibi_lm.train.monitoring.hardware import memory_in_use
from alibi_lm.train.monitoring.writers import MetricWriter
from alibi_lm.utils.files import write_text
from alibi_lm.utils.logging import console


class Metrics:
    """Writes a run's metrics; every `log_interval` steps one line each."""

    def __init__(
        self, run: Path, num_steps: int, start_step: int, writers: Sequence[MetricWriter] = ()
    ) -> None:
        """Open the run's files; the metric writers are closed with them."""
        self._num_steps = num_steps
        self._started_at_step = start_step
        self._started = self._last_time = time.perf_counter()
        self._last_step = start_step
        run.mkdir(parents=True, exist_ok=True)
        self._training = _open_after(run / "metrics.jsonl", start_step)
        self._validation = _open_after(run / "validation.jsonl", start_step)
        self._writers = writers

    def log(
        self,
        step: int,
        result: StepResult,
        *,
        tokens: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
    ) -> None:
        """Report step `step` (counted from 1); rates are over the steps since the last report."""
        now = time.perf_counter()
        seconds = max(now - self._last_time, 1e-9)
        rate = (step - self._last_step) * tokens_per_step / seconds
        mfu = rate * flops_per_token / peak_flops if peak_flops else None
        self._last_time, self._last_step = now, step
        memory = memory_in_use()
        line = {
            "step": step,
            "loss": result.loss,
            "grad_norm": _finite(result.grad_norm),
            "lr": result.learning_rate,
            "tokens": tokens,
            "tokens_per_second": rate,
            "mfu": mfu,
            "memory_bytes": memory,
            "skipped": result.skipped,
        }
        _write(self._training, line)
        self._scalars(
            step,
            {
                "train/loss": result.loss,
                "train/grad_norm": line["grad_norm"],
                "train/lr": result.learning_rate,
                "speed/tokens_per_second": rate,
                "speed/mfu": mfu,
                "memory/gib": memory / 2**30,
            },
        )
        console.info(self._line(step, result, rate, mfu, memory, now))

    def _line(
        self, step: int, result: StepResult, rate: float, mfu: float | None, memory: int, now: float
    ) -> str:
        per_step = (now - self._started) / max(1, step - self._started_at_step)
        parts = [
            f"step {step:,}/{self._num_steps:,}",
            f"loss {result.loss:.3f}",
            f"lr {result.learning_rate:.2e}",
            f"grad {result.grad_norm:.2f}",
            f"{_short(rate)} tok/s",
            *([f"mfu {mfu:.0%}"] if mfu is not None else []),
            f"{memory / 2**30:.1f} GiB",
            f"eta {_duration(per_step * (self._num_steps - step))}",
            *(["update skipped by loss scaling"] if result.skipped else []),
        ]
        return "  ".join(parts)

    def validation(self, step: int, losses: dict[int, float]) -> None:
        """Report validation losses by length at step `step`; not counted as training time."""
        line = {"step": step, "losses": {str(length): loss for length, loss in losses.items()}}
        _write(self._validation, line)
        for length, loss in losses.items():
            self._scalars(
                step,
                {
                    f"validation/loss_{length}": loss,
                    f"validation/perplexity_{length}": math.exp(min(loss, 700.0)),
                },
            )
        shown = "  ".join(f"{length}: {loss:.3f}" for length, loss in losses.items())
        console.info(f"step {step:,}/{self._num_steps:,}  validation loss by length  {shown}")

    def pause(self, seconds: float) -> None:
        """Leave time spent on anything but training out of the rates."""
        self._last_time += seconds
        self._started += seconds

    def flush(self) -> None:
        """Write everything reported so far to the disk."""
        for file in (self._training, self._validation):
            file.flush()
            os.fsync(file.fileno())
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flush and close, ignoring a full disk: every save has flushed before."""
        closes = [writer.close for writer in self._writers]
        for action in (self.flush, self._training.close, self._validation.close, *closes):
            with suppress(OSError):
                action()

    def _scalars(self, step: int, values: dict[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        for writer in self._writers:
            writer.scalars(step, known)


def _write(file: TextIO, line: dict[str, Any]) -> None:
    """Append a line, with the time; `line` must hold no NaN."""
    line = {**line, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    file.write(json.dumps(line, allow_nan=False) + "\n")
    file.flush()


def _open_after(path: Path, step: int) -> TextIO:
    """Open for appending, without the lines after `step`: a killed run's, to be done again."""
    if path.exists():
        kept = [
            line
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if (number := _step_of(line)) is not None and number <= step
        ]
        write_text(path, "".join(kept))
    return path.open("a", encoding="utf-8")


def _step_of(line: str) -> int | None:
    """The step of a line; None for the last line of a killed run, which may be cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s"
