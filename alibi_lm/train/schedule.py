"""The learning rate as a function of the step, so that nothing of it needs to be stored."""

from __future__ import annotations

import math

from alibi_lm.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps` (the first step already moves), then:

    - constant: the peak.
    - cosine, linear: down to `min_learning_rate` at `num_steps`.
    - inverse_sqrt: peak x sqrt(max(warmup_steps, 1) / (step + 1)), not below `min_learning_rate`
      (Vaswani et al. 2017, section 5.3, scaled to reach the peak at the end of the warm-up).
    - wsd: the peak, then linearly down over the last `decay_steps` (warm-up, stable, decay).
    """
    peak, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return max(low, peak * math.sqrt(max(config.warmup_steps, 1) / (step + 1)))
    start = config.warmup_steps
    if config.schedule == "wsd":
        decay = config.num_steps // 10 if config.decay_steps is None else config.decay_steps
        start = max(start, config.num_steps - decay)
    progress = min(1.0, max(0.0, (step - start) / max(1, config.num_steps - start)))
    if config.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
    return low + (peak - low) * (1 - progress)
