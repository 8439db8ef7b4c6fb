"""Learning rates against torch's own schedulers and hand-made values."""

import math

import pytest
import torch

from alibi_lm.train import config, schedule
from alibi_lm.train.config import TrainConfig
from alibi_lm.train.schedule import learning_rate


def rates(**settings: object) -> list[float]:
    config = TrainConfig(num_steps=100, learning_rate=0.5, min_learning_rate=0.1, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(100)]


def test_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.1)
    expected = []
    for _ in range(100):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(schedule="cosine") == pytest.approx(expected, rel=1e-9)


def test_linear_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=100)
    expected = []
    for _ in range(100):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(schedule="linear") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt", "constant", "wsd"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    values = rates(schedule=schedule, warmup_steps=10)
    assert values[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(values) == pytest.approx(0.5)
    assert all(0.1 <= value <= 0.5 for value in values[10:])


def test_inverse_sqrt_constant_and_wsd() -> None:
    values = rates(schedule="inverse_sqrt", warmup_steps=4)
    assert values[15] == pytest.approx(0.5 * math.sqrt(4 / 16))
    assert values[99] == pytest.approx(0.1)
    assert set(rates(schedule="constant")) == {0.5}
    values = rates(schedule="wsd", decay_steps=20)
    assert set(values[:81]) == {0.5}
    assert values[90] == pytest.approx(0.3)
    assert values[99] == pytest.approx(0.1 + 0.4 / 20)
    assert rates(schedule="wsd")[89] == 0.5
    assert rates(schedule="wsd")[91] < 0.5


def test_every_name_that_the_settings_take_is_a_schedule() -> None:
    assert set(config.SCHEDULES) == set(schedule.SCHEDULES)
