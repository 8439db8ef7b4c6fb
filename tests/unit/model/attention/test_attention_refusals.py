"""Attention refuses what a kernel or the inputs cannot do."""

from __future__ import annotations

import pytest
import torch

from alibi_lm.model.attention.dispatch import KERNELS, attention
from alibi_lm.model.slopes import alibi_slopes


class TestRefusals:
    """No kernel runs that cannot do what is asked."""

    @pytest.mark.parametrize(
        ("options", "lacking"),
        [
            ({"window": 3}, "window"),
            ({"bias": torch.zeros(4, 2)}, "bias by distance"),
            ({"bias": torch.zeros(4, 2, requires_grad=True)}, "bias by distance"),
        ],
    )
    def test_flash(self, options: dict, lacking: str) -> None:
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match=lacking):
            attention(q, q, q, slopes=alibi_slopes(4), kernel="sdpa_cpu", **options)
        assert attention(q, q, q, slopes=alibi_slopes(4), **options).shape == q.shape

    def test_flash_with_fp64(self) -> None:
        q = torch.randn(1, 4, 8, 16, dtype=torch.float64)
        with pytest.raises(ValueError, match="float64"):
            attention(q, q, q, slopes=alibi_slopes(4), kernel="sdpa_cpu")

    def test_flash_with_wider_values(self) -> None:
        q, v = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 8, 24)
        with pytest.raises(ValueError, match="width of v"):
            attention(q, q, v, slopes=alibi_slopes(4), kernel="sdpa_cpu")
        assert attention(q, q, v, slopes=alibi_slopes(4)).shape == v.shape

    def test_a_kernel_without_linear_biases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = KERNELS["sdpa_cpu"]
        monkeypatch.setitem(
            KERNELS, "plain", type(plain)(plain.run, None, plain.dtypes, slopes=False)
        )
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match="linear biases"):
            attention(q, q, q, slopes=alibi_slopes(4), kernel="plain")

    @pytest.mark.parametrize(
        ("q", "k", "v"),
        [
            ((1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)),
            ((1, 4, 8, 16), (1, 4, 7, 16), (1, 4, 7, 16)),
            ((1, 4, 8, 16), (1, 4, 8, 8), (1, 4, 8, 8)),
            ((1, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
            ((1, 4, 8, 16), (1, 4, 8, 16), (1, 4, 9, 16)),
            ((4, 8, 16), (4, 8, 16), (4, 8, 16)),
        ],
    )
    def test_shapes(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="q"):
            attention(torch.ones(q), torch.ones(k), torch.ones(v), slopes=alibi_slopes(4))

    def test_slopes_of_another_count(self) -> None:
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match="8 slopes for 4 heads"):
            attention(q, q, q, slopes=alibi_slopes(8))

    def test_mixed_dtypes(self) -> None:
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match="dtypes differ"):
            attention(q, q.bfloat16(), q.bfloat16(), slopes=alibi_slopes(4))

    def test_an_unknown_kernel(self) -> None:
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match="no attention kernel flash"):
            attention(q, q, q, slopes=alibi_slopes(4), kernel="flash")

    def test_a_dtype_without_a_kernel(self) -> None:
        q = torch.ones(1, 4, 8, 16, dtype=torch.int32)
        with pytest.raises(ValueError, match="no attention kernel supports .* dtype torch.int32"):
            attention(q, q, q, slopes=alibi_slopes(4))
