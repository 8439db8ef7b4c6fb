"""Cached decoding gives the uncached tokens; sampling follows its distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from alibi_lm.model.config import Architecture, ModelConfig, Position
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference import generation
from alibi_lm.model.inference.generation import choose, generate, stream
from alibi_lm.model.init import generator
from alibi_lm.utils.errors import ConfigError, DataError

POSITIONS: list[Position] = [
    "alibi", "alibi_learned", "sinusoidal", "learned", "rotary", "t5", "none"
]  # fmt: skip


def make(**options: Any) -> Decoder:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_heads": 6,
        "vocab_size": 97,
        "initializer_range": 0.3,
    }
    if options.get("position") == "learned":
        defaults["max_positions"] = 256
    return Decoder(ModelConfig(**(defaults | options)))


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def uncached(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole sequence computed anew for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_cached_equals_uncached(
    architecture: Architecture, position: Position, kv_heads: int, window: int | None
) -> None:
    decoder = make(
        architecture=architecture, position=position, num_kv_heads=kv_heads, window=window
    )
    tokens = some_tokens(2, 150)
    with torch.no_grad():
        whole = decoder(tokens)
        cache = decoder.new_cache()
        cuts = [0, 7, *range(8, 20), 90, *range(91, 151)]
        parts = [
            decoder(tokens[:, start:stop], cache=cache)
            for start, stop in zip(cuts, cuts[1:], strict=False)
        ]
    assert cache.length == 150
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    prompt = tokens[0, :30].tolist()
    assert generate(decoder, [prompt], 40)[0] == uncached(decoder, prompt, 40)


@pytest.mark.parametrize("position", POSITIONS)
def test_bf16_cached_tokens(position: Position) -> None:
    decoder = make(position=position, num_kv_heads=2).bfloat16()
    tokens = some_tokens(1, 60)
    with torch.no_grad():
        whole = decoder(tokens)
        cache = decoder.new_cache()
        parts = [decoder(tokens[:, i : i + 1], cache=cache) for i in range(60)]
    error = (torch.cat(parts, dim=1) - whole).float().norm() / whole.float().norm()
    assert error < 2e-2


def test_a_long_prompt_goes_in_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make()
    prompt = some_tokens(2100).tolist()
    whole = uncached(decoder, prompt, 3)
    assert generate(decoder, [prompt], 3)[0] == whole
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 7)
    assert generate(decoder, [prompt], 3)[0] == whole


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}])
def test_neighbors_change_nothing(options: dict[str, Any]) -> None:
    decoder = make()
    prompts = [some_tokens(n, seed=n).tolist() for n in (5, 3, 5, 1, 3)]
    together = generate(decoder, prompts, 12, seed=4, **options)
    for index, prompt in enumerate(prompts):
        fillers = [[1, 2]] * index
        alone = generate(decoder, [*fillers, prompt], 12, seed=4, **options)
        assert alone[-1] == together[index]
    assert generate(decoder, prompts, 12, seed=4, **options) == together
    if options:
        assert generate(decoder, prompts, 12, seed=5, **options) != together
        same = generate(decoder, [prompts[0], prompts[0]], 12, seed=4, **options)
        assert same[0] != same[1]


def test_tensor_prompts_and_streams() -> None:
    decoder = make()
    prompts = some_tokens(3, 6)
    rows = generate(decoder, prompts, 8, temperature=0.9, top_p=0.8, seed=2)
    assert rows == generate(decoder, prompts.tolist(), 8, temperature=0.9, top_p=0.8, seed=2)
    streamed = stream(decoder, prompts[0].tolist(), 8, temperature=0.9, top_p=0.8, seed=2)
    assert list(streamed) == rows[0]


def test_the_end_ends_a_row() -> None:
    decoder = make()
    prompts = [some_tokens(4, seed=seed).tolist() for seed in range(4)]
    free = generate(decoder, prompts, 20)
    eos = free[0][5]
    for row, stopped in zip(free, generate(decoder, prompts, 20, eos_id=eos), strict=True):
        assert stopped == (row[: row.index(eos) + 1] if eos in row else row)
    assert list(stream(decoder, prompts[0], 20, eos_id=eos)) == free[0][: free[0].index(eos) + 1]
    assert generate(decoder, prompts, 0) == [[], [], [], []]
    assert generate(decoder, [], 5) == []


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.6), (0.9, 8, 0.8), (1.0, 1, None)],
)
def test_draws_follow_transformers_distribution(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(dim=-1)[0]
    count = 4000
    drawn = choose(
        logits.expand(count, -1),
        temperature,
        top_k,
        top_p,
        [generator(0, index) for index in range(count)],
    )
    found = torch.bincount(drawn, minlength=20) / count
    assert (found[expected == 0] == 0).all()
    # Five standard deviations of a share among 4,000 draws.
    assert ((found - expected).abs() <= 5 * (expected / count).sqrt()).all()


def test_a_small_temperature_is_greedy() -> None:
    logits = torch.randn(5, 20)
    rows = [generator(0, index) for index in range(5)]
    assert torch.equal(choose(logits, 1e-300, None, None, rows), logits.argmax(dim=-1))


class TestRefusals:
    @pytest.mark.parametrize("prompt", [[], [97], [-1]])
    def test_prompts(self, prompt: list[int]) -> None:
        with pytest.raises(DataError, match="prompt 1"):
            generate(make(), [[1], prompt], 3)

    @pytest.mark.parametrize(
        "options",
        [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}],
    )
    def test_settings(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            generate(make(), [[1]], 3, **options)

    def test_past_a_learned_table(self) -> None:
        with pytest.raises(ConfigError, match="max_positions"):
            generate(make(position="learned", max_positions=8), [[1, 2]], 10)

    def test_weights_that_are_not_finite(self) -> None:
        decoder = make()
        decoder.head.norm.weight.data[0] = float("nan")
        with pytest.raises(ValueError, match="not finite"):
            generate(decoder, [[1]], 3)

    def test_gradients_through_a_cache(self) -> None:
        decoder = make()
        with pytest.raises(ValueError, match="no_grad"):
            decoder(some_tokens(1, 3), cache=decoder.new_cache())

    def test_a_cache_of_another_batch_or_precision(self) -> None:
        decoder = make()
        with torch.no_grad():
            cache = decoder.new_cache()
            decoder(some_tokens(2, 3), cache=cache)
            with pytest.raises(ValueError, match="the cache holds"):
                decoder(some_tokens(1, 3), cache=cache)
            with (
                torch.autocast("cpu", dtype=torch.bfloat16),
                pytest.raises(ValueError, match="the cache holds"),
            ):
                decoder(some_tokens(2, 3), cache=cache)


def test_a_cut_cache_goes_on_as_if_never_longer() -> None:
    decoder = make()
    tokens = some_tokens(1, 30)
    with torch.no_grad():
        whole = decoder(tokens)
        cache = decoder.new_cache()
        decoder(torch.cat([tokens[:, :20], some_tokens(1, 90, seed=9)], dim=1), cache=cache)
        cache.truncate(20)
        rest = decoder(tokens[:, 20:], cache=cache)
    torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cannot be cut"):
        cache.truncate(31)


def test_the_cache_does_not_copy_itself_for_every_token() -> None:
    decoder = make()
    moves = 0
    last = None
    with torch.no_grad():
        cache = decoder.new_cache()
        for token in some_tokens(1, 1000).split(1, dim=1):
            decoder(token, cache=cache)
            keys = cache.layers[0]._keys
            assert keys is not None
            moves += keys.data_ptr() != last
            last = keys.data_ptr()
            assert keys.shape[2] <= 2 * max(cache.length, 64)
    assert moves <= 6
