"""The position schemes that ALiBi is compared with. All take any length, except learned.

Tables are computed in double precision on first use and rounded to fp32 once, so distant positions
are as exact as early ones.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from alibi_lm.utils.errors import ConfigError, Problem

BASE = 10000.0
"""Base of the wavelengths of sinusoidal and rotary positions."""
NUM_BUCKETS = 32
"""T5: distances are put into this many buckets."""
MAX_DISTANCE = 128
"""T5: distances from here on share the last bucket."""


def sinusoidal(start: int, length: int, width: int, device: torch.device) -> Tensor:
    """Rows start, ..., start + length - 1 of the sinusoidal table as fp32 [length, width].

    Column 2c is sin(p / 10000^(2c/width)), column 2c + 1 its cosine (Vaswani et al. 2017,
    section 3.5).
    """
    return _sinusoidal(start, length, width, device)


@lru_cache(maxsize=2)
def _sinusoidal(start: int, length: int, width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        waves = torch.arange((width + 1) // 2, dtype=torch.float64, device="cpu")
        angles = _angles(start, length, BASE ** (-2 * waves / width))
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
        return table.to(torch.float32).to(device)


def _angles(start: int, length: int, frequencies: Tensor) -> Tensor:
    """position x frequency as fp64 [length, frequencies]."""
    positions = torch.arange(start, start + length, dtype=torch.float64, device="cpu")
    return positions[:, None] * frequencies


def rotate(x: Tensor, start: int, frequencies: tuple[float, ...], magnitude: float = 1.0) -> Tensor:
    """Rotary positions start, start + 1, ... applied to x [B, H, T, D], D even; same dtype.

    Dimension c turns with c + D/2 by position x frequencies[c] (Su et al. 2021, in GPT-NeoX's half
    layout), and the result is multiplied by `magnitude`. The turn is computed in fp32 (fp64 for
    fp64).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cosine, sine = _rotary(start, x.shape[2], frequencies, magnitude, wide, x.device)
    first, second = x.to(wide).chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


@lru_cache(maxsize=2)
def _rotary(
    start: int,
    length: int,
    frequencies: tuple[float, ...],
    magnitude: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        angles = _angles(
            start, length, torch.tensor(frequencies, dtype=torch.float64, device="cpu")
        )
        cosine, sine = angles.cos() * magnitude, angles.sin() * magnitude
        return cosine.to(dtype).to(device), sine.to(dtype).to(device)


def relative_buckets(device: torch.device) -> Tensor:
    """T5's causal bucket of the distances 0, ..., 128 as int64 [129]; farther ones share the last.

    The first half of the buckets are single distances, the rest grow in size logarithmically up
    to `MAX_DISTANCE` (Raffel et al. 2020, and their code).
    """
    exact = NUM_BUCKETS // 2
    distances = torch.arange(MAX_DISTANCE + 1, device=device)
    share = (distances.clamp(min=1).float() / exact).log() / math.log(MAX_DISTANCE / exact)
    far = exact + (share * (NUM_BUCKETS - exact)).to(torch.int64)
    return torch.where(distances < exact, distances, far.clamp(max=NUM_BUCKETS - 1))


def check_learned(stop: int, max_positions: int) -> None:
    """Refuse positions from `max_positions` on: a learned table has no row for them.

    Raises:
        ConfigError: position `stop` - 1 has no row.
    """
    if stop > max_positions:
        raise ConfigError(
            Problem(
                "model.max_positions",
                max_positions,
                f"position: learned has no position {stop - 1}",
                "shorten the input, or train with more positions",
            )
        )
