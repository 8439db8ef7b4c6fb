"""The pruned KV cache: right for every input, bounded where attention spans are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference import kv_offload, pruned_kv_cache
from alibi_lm.model.inference.generation import decoding_cache, generate, prefill
from alibi_lm.model.inference.kv_offload import KVOffloadStore
from alibi_lm.model.inference.long_scoring import DENSE_UP_TO
from alibi_lm.model.inference.pruned_kv_cache import PrunedKVCache, PrunedKVLayer, PrunedKVReport
from alibi_lm.model.slopes import alibi_slopes

WIDTH = 16


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decode(
    layer: PrunedKVLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...],
    pieces: list[int],
) -> Tensor:
    parts = zip(q.split(pieces, 2), k.split(pieces, 2), v.split(pieces, 2), strict=True)
    return torch.cat([layer.attend(*part, slopes=slopes) for part in parts], dim=2)


def assert_certified(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], epsilon: float
) -> None:
    exact = attention(q.double(), k.double(), v.double(), slopes=slopes)
    own = (attention(q, k, v, slopes=slopes).double() - exact).abs().max().item()
    error = (out.double() - exact).abs().max().item()
    assert error <= 2 * epsilon * v.double().norm(dim=-1).max().item() + 2 * own, f"{error}, {own}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 8, 8), (2, 4, 2), (1, 4, 1)])
def test_token_by_token_and_in_pieces(
    batch: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    length, slopes = 900, alibi_slopes(heads)
    q = noise(1, batch, heads, length, WIDTH).to(dtype)
    k, v = (noise(n, batch, kv_heads, length, WIDTH).to(dtype) for n in (2, 3))
    for pieces in ([1] * length, [400, 1, 1, 98, *[1] * 400], [length]):
        report = PrunedKVReport()
        layer = PrunedKVLayer(1e-6, None, report)
        out = decode(layer, q, k, v, slopes, pieces)
        assert out.dtype == dtype
        assert layer.length == length
        assert_certified(out, q, k, v, slopes, 1e-6)
        assert report.queries == pieces.count(1) * batch * heads


def test_sliding_caches_are_bounded_once_they_have_the_span() -> None:
    length, slopes = 2600, (0.5, 0.25, 1 / 16)
    q, k, v = (noise(n, 1, 3, length, WIDTH) for n in (4, 5, 6))
    report = PrunedKVReport()
    layer = PrunedKVLayer(1e-6, None, report)
    decode(layer, q[:, :, :1400], k[:, :, :1400], v[:, :, :1400], slopes, [1] * 1400)
    hot, before = layer.resident_kv_bytes, report.offload_queries
    decode(layer, q[:, :, 1400:], k[:, :, 1400:], v[:, :, 1400:], slopes, [1] * 1200)
    assert layer.resident_kv_bytes == hot
    assert hot < 2 * 3 * 1200 * WIDTH * 4
    assert (
        report.offload_queries - before
        <= 1200 * 3 * pruned_kv_cache.MAX_OFFLOAD_QUERIES // pruned_kv_cache.REVIEW_INTERVAL
    )


@pytest.mark.parametrize("mapped", [False, True])
def test_a_late_query_reads_offloaded_keys(
    tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small norms first, then a query a hundred times larger, that wants the first keys."""
    monkeypatch.setattr(kv_offload, "SEGMENT", 512)
    length, slopes = 3000, alibi_slopes(8)[:6]
    q, k, v = (noise(n, 1, 6, length, WIDTH) for n in (7, 8, 9))
    q = q * 0.2
    q[:, :, -2] *= 500
    k[:, :, 3] = q[:, :, -2] / 4
    v[:, :, 3] = 30
    report = PrunedKVReport()
    layer = PrunedKVLayer(1e-6, tmp_path if mapped else None, report)
    out = decode(layer, q, k, v, slopes, [2300, *[1] * 700])
    assert_certified(out, q, k, v, slopes, 1e-6)
    # The flattest of these heads does see the key from 2,995 tokens away.
    assert out[0, 5, -2].mean() > 25
    assert report.offload_queries >= 6
    assert report.offload_keys > 2000
    assert not list(tmp_path.iterdir())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(0, 699), max_size=6), st.floats(-2, 2.5))
def test_nothing_breaks_the_certificate(seed: int, places: list[int], exponent: float) -> None:
    length, slopes = 700, (0.3, 0.02)
    q, k, v = (noise(seed + n, 1, 2, length, WIDTH) for n in range(3))
    for n, place in enumerate(places):
        (q if n % 2 else k)[:, :, place] *= 10**exponent
    layer = PrunedKVLayer(1e-3, None, PrunedKVReport())
    out = decode(layer, q, k, v, slopes, [300, *[1] * 400])
    assert_certified(out, q, k, v, slopes, 1e-3)


def test_a_missing_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pruned_kv_cache,
        "log_dropped_mass",
        lambda rows, *_: torch.full_like(rows.norms[:, 0], -math.inf),
    )
    q, k, v = (noise(n, 1, 1, 1500, WIDTH) for n in (7, 8, 9))
    out = decode(PrunedKVLayer(1e-6, None, PrunedKVReport()), q, k, v, (1 / 256,), [1] * 1500)
    with pytest.raises(AssertionError):
        assert_certified(out, q, k, v, (1 / 256,), 1e-6)


def test_truncation_forgets() -> None:
    slopes = alibi_slopes(4)
    q, k, v = (noise(n, 1, 4, 1300, WIDTH) for n in (10, 11, 12))
    layer = PrunedKVLayer(1e-6, None, PrunedKVReport())
    decode(layer, q, k, v, slopes, [900, *[1] * 400])
    layer.truncate(950)
    assert layer.length == 950
    k2, v2 = (torch.cat([x[:, :, :950], -x[:, :, 950:]], dim=2) for x in (k, v))
    q, new_k, new_v = q[:, :, 950:], k2[:, :, 950:], v2[:, :, 950:]
    out = decode(layer, q, new_k, new_v, slopes, [50, *[1] * 300])
    exact = attention(*(x.double() for x in (q, k2, v2)), slopes=slopes)
    assert (out.double() - exact).abs().max() < 2e-5


def test_the_offload_store_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_offload, "SEGMENT", 100)
    keys, values = noise(13, 2, 450, 4), noise(14, 2, 450, 4)
    store = KVOffloadStore()
    for first, stop in ((0, 30), (30, 350), (350, 450)):
        store.write(keys[:, first:stop], values[:, first:stop])
    for first, stop in ((0, 450), (99, 101), (400, 450), (250, 250), (100, 200)):
        read = store.read(first, stop)
        assert torch.equal(read[0], keys[:, first:stop])
        assert torch.equal(read[1], values[:, first:stop])
    with pytest.raises(IndexError):
        store.read(0, 451)
    store.truncate(210)
    assert store.num_bytes == 3 * 2 * 2 * 100 * 4 * 4


def test_pruned_generation_is_the_dense_one() -> None:
    config = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=97, num_kv_heads=2)
    decoder = Decoder(config).eval()
    prompts = torch.randint(97, (2, DENSE_UP_TO), generator=torch.Generator().manual_seed(0))
    dense = generate(decoder, prompts, 300)
    report = PrunedKVReport()
    assert generate(decoder, prompts, 300, pruning_tolerance=1e-6, report=report) == dense
    assert report.queries == 299 * 2 * 2 * 4
    cache = decoding_cache(decoder, 3000, 1e-6)
    assert isinstance(cache, PrunedKVCache)
    reference = decoder.new_cache()
    difference = prefill(decoder, prompts, cache) - prefill(decoder, prompts, reference)
    assert difference.abs().max() < 1e-5
    assert not isinstance(decoding_cache(decoder, 100, 1e-6), PrunedKVCache)
    assert not isinstance(decoding_cache(decoder, 3000, 0.0), PrunedKVCache)
