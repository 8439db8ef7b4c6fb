"""Block-sparse inference on the AMX kernel: the spans and results of torch's kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alibi_lm.model.pruning.block_sparse import (
    AmxBlockSparseAttention,
    BlockSparseAttention,
    amx_unsupported_reason,
    attend,
)
from alibi_lm.model.pruning.bounds import KeyNormBound
from alibi_lm.model.slopes import alibi_slopes
from tests.unit.kernels.needs_amx import needs_amx
from tests.unit.model.pruning.driver import TailKV, pruned_sequence

pytestmark = needs_amx
HEADS, LENGTH, WIDTH = 8, 3000, 16


def tail(start: int, k: Tensor, v: Tensor) -> TailKV:
    key_norms = KeyNormBound(k)
    key_norms.add(k)
    return TailKV(start, k, v, key_norms)


def tensors(kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, LENGTH, WIDTH, generator=generator).bfloat16()
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return q, k, v


def backends_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes that read something, in order."""
    found: list[str] = []

    def noting(kind: type[BlockSparseAttention]) -> None:
        read = kind._read_local

        def note(blocks: BlockSparseAttention) -> int:
            found.append(type(blocks).__name__)
            return read(blocks)

        monkeypatch.setattr(kind, "_read_local", note)

    noting(BlockSparseAttention)
    noting(AmxBlockSparseAttention)
    return found


@pytest.mark.parametrize("start", [0, 1000, 1037])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_both_kernels_read_and_compute_the_same(
    kv_heads: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries from 1,280 on; keys before `start` are offloaded, and flat heads need them."""
    q, k, v = tensors(kv_heads)
    slopes = alibi_slopes(HEADS)
    found = backends_used(monkeypatch)
    compiled = tail(start, k, v)
    output, spans = attend(q[:, 1280:], compiled, 1280, slopes, 1e-6)
    assert found == [
        "AmxBlockSparseAttention",
        "BlockSparseAttention",
    ]
    wide = tail(start, k.float(), v.float())
    expected, wanted = attend(q[:, 1280:].float(), wide, 1280, slopes, 1e-6)
    assert found[2:] == ["BlockSparseAttention", "BlockSparseAttention"]
    assert output.dtype == torch.bfloat16
    # Twice the rounding of a result below 4, and of shares that add up to 1.
    assert (output.float() - expected).abs().max() < 4 * 2**-8
    assert bool(compiled.read_ranges) == bool(wide.read_ranges) == (start > 0)
    for own, other in zip(spans, wanted, strict=True):
        assert own.first == other.first
        # A little more may have been local, which proves a little more.
        assert (own.keys - other.keys).abs().max() <= 64


def test_what_the_kernel_cannot_serve_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(HEADS)
    source = tail(0, k, v)
    assert amx_unsupported_reason(q, source) is None
    assert "float32" in str(amx_unsupported_reason(q.float(), source))
    assert "15" in str(amx_unsupported_reason(q[..., :15], source))
    assert "few" in str(amx_unsupported_reason(q[:4, -128:], source))
    found = backends_used(monkeypatch)
    attend(q[:4, -128:], tail(0, k[:4], v[:4]), LENGTH - 128, alibi_slopes(4), 1e-6)
    assert found == ["BlockSparseAttention"]


def test_a_whole_input_in_bf16_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the certificate's tests of short inputs are of the compiled kernel too."""
    q, k, v = (x[:, :1500] for x in tensors(HEADS))
    found = backends_used(monkeypatch)
    pruned_sequence(q, k, v, alibi_slopes(HEADS), 1e-6)
    assert found == ["AmxBlockSparseAttention", "BlockSparseAttention"]
