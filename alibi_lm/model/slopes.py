"""The slopes of ALiBi: one number a head, fixed and exact in double precision, or learned.

Source: Press, Smith, Lewis, "Train Short, Test Long" (2022), section 3 and the authors' code.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

Slopes: TypeAlias = tuple[float, ...] | Tensor
"""Slopes of some heads: exact on the host, or a tensor [H] on the device that computes."""


@lru_cache(maxsize=64)
def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The paper's slopes for any number of heads, in head order.

    For n a power of two, m_h = 2^(-8h/n), h = 1..n. Otherwise, with c the largest power of two
    below n: the c slopes, then the first n - c of every second slope of the 2c schedule.

    The score of a query at i and a key at j <= i is q.k/sqrt(head_dim) - m_h (i - j): the slope
    is not scaled by 1/sqrt(head_dim).

    Raises:
        ValueError: fewer than one head.
    """
    if num_heads < 1:
        raise ValueError(f"ALiBi needs at least one head, not {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power)
    if power < num_heads:
        slopes += _geometric(2 * power)[::2][: num_heads - power]
    return tuple(slopes)


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


def slice_slopes(slopes: tuple[float, ...], rank: int, size: int) -> tuple[float, ...]:
    """The slopes of the heads that `rank` of `size` tensor-parallel ranks holds.

    They are a contiguous slice of the whole model's schedule. The schedule of the local head count
    would be another model.

    Raises:
        ValueError: the heads do not divide by `size`, or there is no such rank.
    """
    if size < 1 or len(slopes) % size:
        raise ValueError(f"{len(slopes)} heads do not divide over {size} ranks")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in [0, {size})")
    share = len(slopes) // size
    return slopes[rank * share : (rank + 1) * share]


def host_slopes(slopes: Slopes | None) -> tuple[float, ...] | None:
    """Slopes as Python floats: exact where they were given so, else the tensor's values."""
    return tuple(slopes.tolist()) if isinstance(slopes, Tensor) else slopes


def device_slopes(slopes: Slopes, device: torch.device) -> Tensor:
    """Slopes as fp32 [H]; a tensor is expected on `device` and is not copied there."""
    if isinstance(slopes, Tensor):
        return slopes.float()
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def learned_slopes(start: Slopes, log_ratio: Tensor) -> Tensor:
    """Slopes start_h exp(log_ratio_h) `[H]`, fp32 (fp64 for fp64), differentiable.

    The learned parameter is the logarithm of a slope's ratio to its initial value: a slope stays
    positive, one step of Adam changes steep and flat slopes by similar ratios, and log_ratio = 0,
    which 16 bits represent exactly, is the initial value itself.
    """
    wide = torch.float64 if log_ratio.dtype == torch.float64 else torch.float32
    if not isinstance(start, Tensor):
        start = torch.tensor(start, dtype=wide, device=log_ratio.device)
    return start.to(wide) * log_ratio.to(wide).exp()
