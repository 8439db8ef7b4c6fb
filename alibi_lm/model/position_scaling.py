"""Positions squeezed by a fixed factor: slopes of linear biases, frequencies of rotary positions.

Everything is computed in double precision from the config alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alibi_lm.model.config import ModelConfig, ScalingConfig
from alibi_lm.model.positions import BASE
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.utils.errors import ConfigError, Problem

YARN_FAST, YARN_SLOW = 32, 1
"""YaRN: pairs of dimensions that turn more often than the first over the original length are left
as they are, those that turn less often than the second are interpolated in full."""


def head_slopes(config: ModelConfig) -> tuple[float, ...] | None:
    """The slopes of all heads, scaled; learned ones as they are at the start. None: no linear bias.

    linear: m_h / s (Position Interpolation for ALiBi, Al-Khateeb et al. 2023).
    ntk with H a power of two: m_h / s^((h - 1)/(H - 1)), so the steepest head keeps its slope and
    the flattest is divided by s.
    ntk in general: the exponent is (ln m_max - ln m_h) / (ln m_max - ln m_min).
    """
    if config.position not in ("alibi", "alibi_learned"):
        return None
    slopes, scaling = alibi_slopes(config.num_heads), config.scaling
    if scaling is None:
        return slopes
    if scaling.kind == "linear":
        return tuple(slope / scaling.factor for slope in slopes)
    if scaling.kind != "ntk":
        raise _not_defined(scaling, config.position)
    logs = [math.log(slope) for slope in slopes]
    steepest, flattest = max(logs), min(logs)
    return tuple(
        slope * scaling.factor ** (-(steepest - log) / (steepest - flattest))
        for slope, log in zip(slopes, logs, strict=True)
    )


def _not_defined(scaling: ScalingConfig, position: str) -> ConfigError:
    rule, fix = f"is not defined for position: {position}", "choose another kind"
    return ConfigError(Problem("model.scaling.kind", scaling.kind, rule, fix))


@dataclass(frozen=True)
class Rotation:
    """How a head's pairs of dimensions turn with the position."""

    frequencies: tuple[float, ...]
    """Angle of each pair at position 1, in radians."""
    magnitude: float = 1.0
    """What turned queries and keys are multiplied by; scores are, by its square."""


def rotation(head_dim: int, scaling: ScalingConfig | None = None) -> Rotation:
    """The rotary frequencies of heads of `head_dim` dimensions.

    linear: theta / s (Chen et al. 2023). ntk: the base becomes base s^(D/(D-2)). yarn: theta / s
    for slow pairs, theta for fast ones, a ramp between them, and the magnitude 0.1 ln s + 1 (Peng
    et al. 2023; the ramp runs over the pair's index, as in their code and in transformers).
    longrope: theta_i / factors_i and the magnitude sqrt(1 + ln s / ln L) (Ding et al. 2024).
    """
    pairs = range(head_dim // 2)
    plain = [BASE ** (-2 * pair / head_dim) for pair in pairs]
    if scaling is None:
        return Rotation(tuple(plain))
    factor, length = scaling.factor, scaling.original_length or 0
    if scaling.kind == "linear":
        return Rotation(tuple(theta / factor for theta in plain))
    if scaling.kind == "ntk":
        base = BASE * factor ** (head_dim / (head_dim - 2))
        return Rotation(tuple(base ** (-2 * pair / head_dim) for pair in pairs))
    if scaling.kind == "longrope":
        divided = (theta / by for theta, by in zip(plain, scaling.factors or [], strict=True))
        return Rotation(tuple(divided), math.sqrt(1 + math.log(factor) / math.log(length)))
    if scaling.kind != "yarn":
        raise _not_defined(scaling, "rotary")
    low = max(math.floor(_pair_of(YARN_FAST, head_dim, length)), 0)
    high = min(math.ceil(_pair_of(YARN_SLOW, head_dim, length)), head_dim - 1)
    span = high - low or 0.001
    shares = [min(max((pair - low) / span, 0.0), 1.0) for pair in pairs]
    mixed = (
        theta * (1 - share) + theta / factor * share
        for theta, share in zip(plain, shares, strict=True)
    )
    return Rotation(tuple(mixed), 0.1 * math.log(factor) + 1)


def _pair_of(turns: int, head_dim: int, length: int) -> float:
    """Index of the pair that turns so often over `length` positions, between two where need be."""
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(BASE))
