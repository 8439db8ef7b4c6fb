"""Comparing runs: their curves and the states that they ended in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from launching import metrics

from alibi_lm.checkpoint.step import open_checkpoint


def assert_same_states(one: Path, other: Path, tolerance: float) -> None:
    """Weights and both moments of the newest steps; tolerance 0 asks for equal bits."""
    first, second = open_checkpoint(one), open_checkpoint(other)
    assert first.step == second.step
    with first.reader() as a, second.reader() as b:
        assert a.shapes == b.shapes
        assert a.kinds == b.kinds == ("param", "exp_avg", "exp_avg_sq")
        for kind in a.kinds:
            for name, tensor in a.tensors(kind):
                if tolerance == 0:
                    assert torch.equal(tensor, b.tensor(name, kind)), (name, kind)
                else:
                    torch.testing.assert_close(b.tensor(name, kind), tensor, atol=tolerance, rtol=0)


def curve(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every line of metrics.jsonl."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run)]


def reaches(run: Path, more_steps: int) -> Callable[[], bool]:
    """Whether a run has gone this many steps beyond where it is now."""
    target = max((line["step"] for line in metrics(run)), default=0) + more_steps
    return lambda: max((line["step"] for line in metrics(run)), default=0) >= target
