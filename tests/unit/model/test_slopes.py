"""Slopes against the authors' code, MPT's formula and published values."""

from __future__ import annotations

import math

import pytest

from alibi_lm.model.slopes import alibi_slopes, slice_slopes


def authors_slopes(num_heads: int) -> list[float]:
    """`get_slopes` of the paper's repository (ofirpress/attention_with_linear_biases)."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(num_heads).is_integer():
        return power_of_two(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return power_of_two(closest) + authors_slopes(2 * closest)[0::2][: num_heads - closest]


def mpt_slopes(num_heads: int) -> list[float]:
    """`gen_slopes` of MosaicML's llm-foundry, alibi_bias_max = 8."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [1.0 / 2.0 ** (head * (8 / power)) for head in range(1, power + 1)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


@pytest.mark.parametrize("num_heads", range(1, 257))
def test_every_head_count_has_the_published_slopes(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert len(slopes) == num_heads
    assert slopes == pytest.approx(authors_slopes(num_heads), rel=1e-12)
    assert slopes == pytest.approx(mpt_slopes(num_heads), rel=1e-14)


def test_published_values() -> None:
    assert alibi_slopes(4) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8)
    assert twelve[8:] == tuple(2.0**-power for power in (0.5, 1.5, 2.5, 3.5))
    bloom = alibi_slopes(112)
    assert bloom[:64] == alibi_slopes(64)
    assert bloom[64:] == alibi_slopes(128)[::2][:48]


def test_no_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one head"):
        alibi_slopes(0)


@pytest.mark.parametrize(("num_heads", "size"), [(8, 1), (8, 4), (12, 3), (112, 8)])
def test_slices_join_to_the_whole_schedule(num_heads: int, size: int) -> None:
    whole = alibi_slopes(num_heads)
    parts = [slice_slopes(whole, rank, size) for rank in range(size)]
    assert sum(parts, ()) == whole
    if size > 1:
        assert parts[0] != alibi_slopes(num_heads // size)


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (4, 4), (-1, 4), (0, 0)])
def test_impossible_slices_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        slice_slopes(alibi_slopes(8), rank, size)
