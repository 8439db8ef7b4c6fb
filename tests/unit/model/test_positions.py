"""The position schemes against their formulas in float64 and transformers' own code."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.position_scaling import rotation
from alibi_lm.model.positions import relative_buckets, rotate, sinusoidal
from alibi_lm.utils.errors import ConfigError

CPU = torch.device("cpu")


def turned(x: torch.Tensor, start: int) -> torch.Tensor:
    return rotate(x, start, rotation(x.shape[-1]).frequencies)


@pytest.mark.parametrize("start", [0, 1, 1_000_000, 1_000_000_000])
@pytest.mark.parametrize("width", [8, 7])
def test_sinusoidal(start: int, width: int) -> None:
    table = sinusoidal(start, 5, width, CPU)
    for row in range(5):
        for column in range(width):
            angle = (start + row) / 10000 ** (2 * (column // 2) / width)
            right = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[row, column].item() == pytest.approx(right, abs=1e-6)


def test_sinusoidal_enters_scaled() -> None:
    config = ModelConfig(hidden_size=16, num_heads=2, vocab_size=9, position="sinusoidal")
    embedding = Decoder(config).embedding
    tokens = torch.tensor([[3, 1, 4]])
    expected = embedding.weight[tokens] * 4 + sinusoidal(2, 3, 16, CPU)
    torch.testing.assert_close(embedding(tokens, 2), expected)


@pytest.mark.parametrize("start", [0, 3, 500])
def test_rotary_equals_transformers(start: int) -> None:
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    q = torch.randn(2, 4, 9, 16)
    positions = torch.arange(start, start + 9).unsqueeze(0)
    theirs, _ = apply_rotary_pos_emb(q, q, *rotary(q, positions))
    torch.testing.assert_close(turned(q, start), theirs, rtol=1e-5, atol=3e-5)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    near = (turned(q, 7) * turned(k, 3)).sum()
    far = (turned(q, 1_000_004) * turned(k, 1_000_000)).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned(q, 9).norm(), q.norm())
    assert turned(q.bfloat16(), 9).dtype == torch.bfloat16


def test_buckets_equal_transformers() -> None:
    distances = torch.arange(100_000)
    theirs = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=32, max_distance=128
    )
    ours = relative_buckets(CPU)
    assert torch.equal(ours[distances.clamp(max=128)], theirs)


def test_past_the_learned_table_is_refused_by_name() -> None:
    config = ModelConfig(
        hidden_size=16, num_heads=2, vocab_size=9, position="learned", max_positions=8
    )
    decoder = Decoder(config)
    with torch.no_grad():
        cache = decoder.new_cache()
        decoder(torch.zeros(1, 8, dtype=torch.int64), cache=cache)
        with pytest.raises(ConfigError, match=r"model.max_positions = 8.*position 8"):
            decoder(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ConfigError, match=r"position 8"):
        decoder(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("position", ["alibi", "t5", "rotary", "none"])
def test_relative_schemes_ignore_a_shift(position: str) -> None:
    """The last window of keys alone decides, wherever the document starts."""
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=50, window=8, initializer_range=0.3
    )
    config.position = position  # type: ignore[assignment]
    decoder = Decoder(config)
    tokens = torch.randint(0, 50, (1, 60))
    whole, tail = decoder(tokens), decoder(tokens[:, 20:])
    # Two layers of window 8 reach 14 tokens back.
    torch.testing.assert_close(whole[:, 34:], tail[:, 14:], rtol=1e-4, atol=1e-4)
    assert (whole[:, 20:22] - tail[:, :2]).abs().max() > 1e-2
