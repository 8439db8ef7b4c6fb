"""Distances in bins, relative to the training length, which is always an edge."""

from __future__ import annotations

import math

Bin = tuple[int, int]
"""Tokens: above the first, up to the second."""
FINEST = 8
"""The first bin ends at this fraction of the training length."""


def distance_bin(distance: int, training_length: int) -> Bin:
    """The bin of a distance: edges at 1/8, 1/4, 1/2, 1, 2, 4, ... times the training length."""
    if distance * FINEST <= training_length:
        return 0, training_length // FINEST
    exponent = math.ceil(math.log2(distance / training_length))
    # The logarithm may be off by a rounding at an edge itself.
    while distance > math.ldexp(training_length, exponent):
        exponent += 1
    while distance <= math.ldexp(training_length, exponent - 1):
        exponent -= 1
    return (
        math.floor(math.ldexp(training_length, exponent - 1)),
        math.floor(math.ldexp(training_length, exponent)),
    )
