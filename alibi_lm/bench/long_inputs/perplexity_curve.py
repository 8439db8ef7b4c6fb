"""Perplexity of the same tokens with ever longer inputs, also where dense attention gives up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.long_scoring import DENSE_UP_TO, long_losses
from alibi_lm.utils.logging import console

TOKENS_AT_ONCE = 16384


def perplexity_curve(
    decoder: Decoder, text: Tensor, lengths: Sequence[int], num_targets: int, epsilon: float
) -> list[dict[str, Any]]:
    """Perplexity of the last `num_targets` tokens of the longest length, and seconds, by length.

    A length above `num_targets` is one input that ends where the text does. A shorter one is taken
    as windows side by side that hold the targets, each of which then sees less.

    Args:
        decoder: an ALiBi model.
        text: [N + 1] tokens, N at least the longest length.
        lengths: ascending; those below `num_targets` divide it.
        num_targets: tokens that are scored.
        epsilon: what each head and row may leave out.
    """
    text = text[: lengths[-1] + 1]
    rows = []
    for length in lengths:
        start = time.perf_counter()
        losses = _last_losses(decoder, text[-max(length, num_targets) - 1 :], length, epsilon)
        seconds = time.perf_counter() - start
        losses = losses[-num_targets:].double()
        rows.append({
            "length": length,
            "tokens": max(length, num_targets),
            "seconds": round(seconds, 3),
            "perplexity": float(losses.mean().exp()),
        })  # fmt: skip
        console.info(f"  perplexity at {length:,}: {rows[-1]['perplexity']:.4f}, {seconds:.1f} s")
    return rows


def _last_losses(decoder: Decoder, text: Tensor, length: int, epsilon: float) -> Tensor:
    """Losses of text [n + 1], taken as windows of `length`."""
    inputs, targets = text[:-1], text[1:]
    if length > DENSE_UP_TO:
        return torch.cat([
            long_losses(decoder, part, labels, epsilon)
            for part, labels in zip(inputs.split(length), targets.split(length), strict=True)
        ])  # fmt: skip
    windows = max(1, TOKENS_AT_ONCE // length)
    with torch.inference_mode():
        return torch.cat([
            decoder.losses(part, labels).flatten()
            for part, labels in zip(inputs.view(-1, length).split(windows),
                                    targets.view(-1, length).split(windows), strict=True)
        ])  # fmt: skip


def dense_seconds(rows: Sequence[dict[str, Any]], length: int) -> float:
    """What a dense path would need for one input: a n + b n^2, by least squares on measured ones.

    Args:
        rows: measured lengths and their lists of seconds; at least two lengths.
        length: the input's.
    """
    lengths = torch.tensor([row["length"] for row in rows], dtype=torch.float64)
    seconds = torch.tensor([min(row["seconds"]) for row in rows], dtype=torch.float64)
    # Relative errors count: the longest would outweigh all others.
    matrix = torch.stack([lengths, lengths**2], dim=1) / seconds[:, None]
    found = torch.linalg.lstsq(matrix, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    return float(found[0] * length + found[1] * length**2)
