"""metrics.jsonl over stops and resumes."""

import json
from datetime import UTC, datetime
from pathlib import Path

from alibi_lm.train.engine.base import StepResult
from alibi_lm.train.monitoring.metrics import Metrics


def report(metrics: Metrics, step: int) -> None:
    metrics.log(
        step,
        StepResult(loss=5.0 - step / 10, grad_norm=1.0, learning_rate=1e-3, skipped=False),
        tokens=step * 512,
        tokens_per_step=512,
        flops_per_token=1e6,
        peak_flops=1e12,
    )


def test_lines_of_steps_done_again_are_replaced(tmp_path: Path) -> None:
    start = datetime.now(UTC).replace(microsecond=0)
    first = Metrics(tmp_path, 10, 0)
    for step in range(1, 8):
        report(first, step)
    first.validation(4, {64: 3.0, 256: 3.5})
    first.validation(7, {64: 2.0, 256: 2.5})
    first.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # cut short by a kill
    second = Metrics(tmp_path, 10, 5)
    for step in range(6, 11):
        report(second, step)
    second.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    for key in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second"):
        assert key in lines[0]
    assert lines[9]["tokens"] == 5120
    validation = [json.loads(line) for line in (tmp_path / "validation.jsonl").open()]
    (entry,) = validation
    assert entry["step"] == 4
    assert entry["losses"] == {"64": 3.0, "256": 3.5}
    times = [datetime.fromisoformat(line["time"]) for line in (*lines, entry)]
    assert all(start <= time <= datetime.now(UTC) for time in times)
