"""The learning rate as a function of the step, so that none of it needs to be stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from alibi_lm.train.config import TrainConfig
from alibi_lm.utils import plugins

Schedule = Callable[[TrainConfig, int], float]
"""Learning rate of a step (counted from 0) after the warm-up.

A function of its arguments alone: a resumed run calls it for the steps that remain.
"""


def constant(config: TrainConfig, step: int) -> float:
    """The peak."""
    return config.learning_rate


def cosine(config: TrainConfig, step: int) -> float:
    """Half a cosine from the peak to `min_learning_rate` at `num_steps`."""
    low = config.min_learning_rate
    progress = _progress(config, step, config.warmup_steps)
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(config: TrainConfig, step: int) -> float:
    """A straight line from the peak to `min_learning_rate` at `num_steps`."""
    return _line(config, step, config.warmup_steps)


def inverse_sqrt(config: TrainConfig, step: int) -> float:
    """Peak x sqrt(max(warmup_steps, 1) / (step + 1)), not below `min_learning_rate`.

    Vaswani et al. 2017, section 5.3, scaled to reach the peak at the end of the warm-up.
    """
    rate = config.learning_rate * math.sqrt(max(config.warmup_steps, 1) / (step + 1))
    return max(config.min_learning_rate, rate)


def wsd(config: TrainConfig, step: int) -> float:
    """The peak, then a straight line over the last `decay_steps` (warm-up, stable, decay)."""
    decay = config.num_steps // 10 if config.decay_steps is None else config.decay_steps
    return _line(config, step, max(config.warmup_steps, config.num_steps - decay))


SCHEDULES: Mapping[str, Schedule] = {
    function.__name__: function for function in (cosine, linear, inverse_sqrt, constant, wsd)
}
"""By the name that `train.schedule` gives; other packages add theirs as entry points."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps` (the first step already moves), then the schedule.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return _schedule(config.schedule)(config, step)


@cache
def _schedule(name: str) -> Schedule:
    return SCHEDULES.get(name) or plugins.load_plugin(plugins.SCHEDULES, name)


def _progress(config: TrainConfig, step: int, start: int) -> float:
    """0 at step `start` to 1 at `num_steps`."""
    return min(1.0, max(0.0, (step - start) / max(1, config.num_steps - start)))


def _line(config: TrainConfig, step: int, start: int) -> float:
    peak, low = config.learning_rate, config.min_learning_rate
    return low + (peak - low) * (1 - _progress(config, step, start))
