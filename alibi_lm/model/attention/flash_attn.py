"""Attention with linear biases on the flash-attn 2 package.

`flash_attn_func` adds -slope |i + Tk - Tq - j| to the scores in fp32, so it aligns the queries with
the last keys, as `dispatch.attention` does. It has forward and backward passes, grouped key heads
and windows.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

import torch
from torch import Tensor

from alibi_lm.model.slopes import Slopes, device_slopes

PACKAGE = "flash_attn"
WIDEST = 256
"""Widest heads of the package's kernels."""
_CAPABILITY = (8, 0)


@cache
def missing(device: torch.device) -> str | None:
    """What this kernel needs and this machine does not have, or None."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"without the package {PACKAGE}"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "a GPU older than Ampere"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Slopes | None, window: int | None) -> Tensor:
    """Attention of `dispatch.attention` without bias by distance.

    Args:
        q: [B, H, Tq, D] on a GPU, in bf16 or fp16.
        k, v: [B, KV, Tk, D].
        slopes: H slopes or None.
        window: keys that a query sees, itself included, or None.

    Returns:
        [B, H, Tq, D].
    """
    function = importlib.import_module(PACKAGE).flash_attn_func
    output: Tensor = function(
        *(x.transpose(1, 2) for x in (q, k, v)),
        causal=True,
        # Keys before and after the query's own position; -1 is no limit.
        window_size=(-1, -1) if window is None else (window - 1, 0),
        alibi_slopes=None if slopes is None else device_slopes(slopes, q.device),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output.transpose(1, 2)
