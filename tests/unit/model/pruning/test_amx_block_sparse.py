"""Horizons on the compiled kernel: the same reaches, and what torch's kernel computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from alibi_lm.model.pruning import pruned_attention
from alibi_lm.model.pruning.amx_block_sparse import AmxBlockSparseAttention, amx_unsupported_reason
from alibi_lm.model.pruning.block_sparse import BlockSparseAttention
from alibi_lm.model.pruning.bounds import KeyNormBound
from alibi_lm.model.pruning.pruned_attention import attend
from alibi_lm.model.slopes import alibi_slopes
from tests.unit.kernels.needs_amx import needs_amx

pytestmark = needs_amx
HEADS, LENGTH, WIDTH = 8, 3000, 16


@dataclass
class Tail:
    """The keys and values from `start` on are at hand, those before are asked for."""

    start: int
    all_keys: Tensor
    all_values: Tensor
    asked: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys, self.values = self.all_keys[:, self.start :], self.all_values[:, self.start :]
        self.ball = KeyNormBound(self.all_keys)
        self.ball.add(self.all_keys)

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        self.asked.append((first, stop))
        return self.all_keys[:, first:stop], self.all_values[:, first:stop]


def tensors(kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, LENGTH, WIDTH, generator=generator).bfloat16()
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return q, k, v


def made_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of blocks that read something, in turn."""
    found: list[str] = []

    def noting(kind: type[BlockSparseAttention]) -> None:
        read = kind._read_near

        def note(blocks: BlockSparseAttention) -> int:
            found.append(type(blocks).__name__)
            return read(blocks)

        monkeypatch.setattr(kind, "_read_near", note)

    noting(BlockSparseAttention)
    noting(AmxBlockSparseAttention)
    return found


@pytest.mark.parametrize("start", [0, 1000, 1037])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_both_kernels_read_and_compute_the_same(
    kv_heads: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries from 1,280 on; keys before `start` are not at hand, and flat heads want them."""
    q, k, v = tensors(kv_heads)
    slopes = alibi_slopes(HEADS)
    found = made_by(monkeypatch)
    compiled = Tail(start, k, v)
    output, reaches = attend(q[:, 1280:], compiled, 1280, slopes, 1e-6)
    assert found == [
        "AmxBlockSparseAttention",
        "BlockSparseAttention",
    ]
    wide = Tail(start, k.float(), v.float())
    expected, wanted = attend(q[:, 1280:].float(), wide, 1280, slopes, 1e-6)
    assert found[2:] == ["BlockSparseAttention", "BlockSparseAttention"]
    assert output.dtype == torch.bfloat16
    # Twice the rounding of a result below 4, and of shares that add up to 1.
    assert (output.float() - expected).abs().max() < 4 * 2**-8
    assert bool(compiled.asked) == bool(wide.asked) == (start > 0)
    for own, other in zip(reaches, wanted, strict=True):
        assert own.first == other.first
        # A little more may have been near, which proves a little more.
        assert (own.keys - other.keys).abs().max() <= 64


def test_what_the_kernel_cannot_serve_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(HEADS)
    assert amx_unsupported_reason(q, k, v) is None
    assert "float32" in str(amx_unsupported_reason(q.float(), k.float(), v.float()))
    odd = [x[..., :15] for x in (q, k, v)]
    assert "15" in str(amx_unsupported_reason(*odd))
    assert "few" in str(amx_unsupported_reason(q[:4, -128:], k[:4], v[:4]))
    found = made_by(monkeypatch)
    attend(q[:4, -128:], Tail(0, k[:4], v[:4]), LENGTH - 128, alibi_slopes(4), 1e-6)
    assert found == ["BlockSparseAttention"]


def test_a_whole_input_in_bf16_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the certificate's tests of short inputs are of the compiled kernel too."""
    q, k, v = (x[None, :, :1500] for x in tensors(HEADS))
    found = made_by(monkeypatch)
    pruned_attention.pruned_attention(q, k, v, slopes=alibi_slopes(HEADS), epsilon=1e-6)
    assert found == ["AmxBlockSparseAttention", "BlockSparseAttention"]
