"""Losses of long inputs: the same as dense ones, in memory that the pruning bound limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference import long_scoring
from alibi_lm.model.inference.long_scoring import (
    LongScoringReport,
    long_losses,
    pruning_unsupported_reason,
)


def decoder(dtype: torch.dtype = torch.float32, **settings: object) -> Decoder:
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 97}
    made = Decoder(ModelConfig(**{**sizes, **settings}))  # type: ignore[arg-type]
    with torch.no_grad():
        # Scores of a trained size, where the initial ones are near 0.
        for name, weight in made.named_parameters():
            if name.endswith("qkv.weight"):
                weight[:128] *= 8
    return made.to(dtype).eval()


def sequence(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(97, (length + 1,), generator=torch.Generator().manual_seed(seed))
    return tokens[:-1], tokens[1:]


def dense(model: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        return model.losses(tokens[None], targets[None])[0]


@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_losses_are_the_dense_ones(
    architecture: str, kv_heads: int | None, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_scoring, "CHUNK", 1024)
    model = decoder(architecture=architecture, num_kv_heads=kv_heads, num_layers=num_layers)
    tokens, targets = sequence(4500)
    report = LongScoringReport()
    losses = long_losses(model, tokens, targets, 1e-6, report)
    assert torch.allclose(losses, dense(model, tokens, targets), rtol=0, atol=5e-5)
    spans = report.heads()
    assert spans.shape == (num_layers, 36, 4)
    assert report.num_tokens == 4500
    # The steepest head reads little, whatever it asks for here.
    assert int(spans[..., 0].max()) < 1024


def test_reduced_precision_scores_as_the_dense_path_does() -> None:
    model = decoder(torch.bfloat16)
    tokens, targets = sequence(4500)
    difference = long_losses(model, tokens, targets, 1e-6) - dense(model, tokens, targets)
    assert difference.mean().abs() < 1e-3


@pytest.mark.parametrize("kept", [128, 512])
def test_what_is_not_kept_is_made_again(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_scoring, "CHUNK", 512)
    monkeypatch.setattr(long_scoring, "MOST_KEPT", kept)
    model = decoder()
    tokens, targets = sequence(3000)
    report = LongScoringReport()
    losses = long_losses(model, tokens, targets, 1e-6, report)
    assert torch.allclose(losses, dense(model, tokens, targets), rtol=0, atol=5e-5)
    assert report.recomputed > 0
    assert report.kept <= kept + 512


def test_a_late_query_reads_keys_that_are_no_longer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet tokens, then one whose queries are a hundred times larger."""
    monkeypatch.setattr(long_scoring, "CHUNK", 512)
    monkeypatch.setattr(long_scoring, "MOST_KEPT", 2048)
    model = decoder(num_layers=2)
    with torch.no_grad():
        # Queries grow with one direction of the stream, that the normalization cannot flatten:
        # token 96 alone has it.
        model.embedding.weight[:96, 0] = 0
        model.embedding.weight[96] = 0
        model.embedding.weight[96, 0] = 1
        loud = 40 * torch.randn(64, generator=torch.Generator().manual_seed(1))
        for name, weight in model.named_parameters():
            if name.endswith("qkv.weight"):
                weight[:128] *= 0.05
                weight[:64, 0] = loud
    tokens, targets = sequence(5000)
    tokens = tokens % 96
    tokens[-5] = 96
    report = LongScoringReport()
    losses = long_losses(model, tokens, targets, 1e-6, report)
    spans = report.heads()[0, :, 2]
    assert int(spans[:-1].max()) < 1500
    assert int(spans[-1]) > 4000
    assert report.recomputed > 0
    assert torch.allclose(losses, dense(model, tokens, targets), rtol=0, atol=1e-4)


def test_models_without_a_pruning_bound_are_refused_by_name() -> None:
    tokens, targets = sequence(10)
    for settings, word in (({"position": "rotary"}, "rotary"), ({"window": 64}, "window")):
        model = decoder(**settings)
        assert word in (pruning_unsupported_reason(model) or "")
        with pytest.raises(ValueError, match=word):
            long_losses(model, tokens, targets, 1e-6)
    with pytest.raises(ValueError, match="epsilon"):
        long_losses(decoder(), tokens, targets, 0)
