"""Comparing the logits and greedy tokens of the native model with the stock class's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.stock import Mismatch, StockLayers, bias_from_the_end, hidden_states
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.generation import generate
from alibi_lm.model.layers import Block, Embedding, Head

TOLERANCE = 1e-4
"""Largest difference of two logits."""
NEW_TOKENS = 64
"""Tokens generated greedily."""
STEP_TOKENS = 128
"""Tokens read at once in the exact comparison: the bias is rounded at its distance from them."""
ATTENTION_BYTES = 1 << 31
"""Score matrices that the stock class may hold, some four times over."""
LOGITS_AT_ONCE = 1 << 24


@torch.no_grad()
def compare_logits(decoder: Decoder, model: Any, tokens: Tensor) -> dict[str, float | int | None]:
    """Largest logit difference over tokens [1, T].

    The stock classes hold the bias of the whole input in fp32, so past some thousand tokens their
    rounding alone can exceed the tolerance. What does is compared once more in fp64, the tokens
    read in small steps through the cache, where the bias of near keys is small and exact.
    """

    def exactly() -> float:
        decoder.double()
        model.double()
        with bias_from_the_end(model):
            found = largest_difference(decoder, model, tokens, STEP_TOKENS)
        decoder.float()
        model.float()
        return found

    return _judged(
        tokens.shape[1],
        decoder.config,
        lambda step_tokens: largest_difference(decoder, model, tokens, step_tokens),
        exactly,
    )


def _judged(
    length: int,
    config: ModelConfig,
    plainly: Callable[[int], float],
    exactly: Callable[[], float],
) -> dict[str, float | int | None]:
    scores = 4 * config.num_heads * length * length
    plain = plainly(length if scores <= ATTENTION_BYTES else 1024)
    exact = None
    if not plain <= TOLERANCE:
        exact = exactly()
        if not exact <= TOLERANCE:
            rule = f"logits differ by {plain:.3g} at {length:,} tokens, {exact:.3g} in fp64"
            raise Mismatch(f"{rule}, more than {TOLERANCE:g}")
    return {"length": length, "max_difference": plain, "max_difference_fp64": exact}


def largest_difference(decoder: Decoder, model: Any, tokens: Tensor, step_tokens: int) -> float:
    """Largest |logit difference|; the stock model reads `step_tokens` at a time.

    NaN in either gives NaN.
    """
    ours = decoder.hidden_states(tokens)
    output = model.get_output_embeddings()
    worst = torch.zeros((), dtype=ours.dtype)
    for start, theirs in hidden_states(model, tokens, step_tokens):
        rows = ours[:, start : start + theirs.shape[1]]
        found = _worst(rows, theirs, decoder.logits, output, decoder.config)
        worst = torch.maximum(worst, found)
    return float(worst)


def _worst(
    ours: Tensor,
    theirs: Tensor,
    our_logits: Callable[[Tensor], Tensor],
    their_logits: Callable[[Tensor], Tensor],
    config: ModelConfig,
) -> Tensor:
    """Largest |logit difference| of hidden states [1, n, d]."""
    portion = max(1, LOGITS_AT_ONCE // (config.vocab_size or 1))
    worst = torch.zeros((), dtype=ours.dtype)
    for our_part, their_part in zip(ours.split(portion, 1), theirs.split(portion, 1), strict=True):
        difference = (our_logits(our_part) - their_logits(their_part)).abs().max()
        worst = torch.maximum(worst, difference)
    return worst


@torch.no_grad()
def compare_logits_by_layer(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    stock: Callable[[torch.dtype], StockLayers],
    tokens: Tensor,
) -> dict[str, float | int | None]:
    """`compare_logits` with one block of each model in memory.

    Args:
        config: the native model.
        weights: its weights by canonical name, read one at a time.
        stock: makes the stock model for a dtype.
        tokens: [1, T].
    """

    def exactly() -> float:
        model = stock(torch.float64)
        with bias_from_the_end(model.model):
            return _layered(config, weights, model, tokens, STEP_TOKENS)

    return _judged(
        tokens.shape[1],
        config,
        lambda step_tokens: _layered(config, weights, stock(torch.float32), tokens, step_tokens),
        exactly,
    )


def _layered(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    model: StockLayers,
    tokens: Tensor,
    step_tokens: int,
) -> float:
    def filled(module: Any, name: str) -> Any:
        state = {key: weights[f"{name}.{key}"].to(model.dtype) for key in module.state_dict()}
        module.load_state_dict(state, assign=True)
        return module

    with torch.device("meta"):
        embedding, block, head = Embedding(config), Block(config), Head(config)
    ours = filled(embedding, "embedding")(tokens)
    embedding.to("meta")
    theirs = model.embed(tokens)
    last = config.num_layers - 1
    for index in range(config.num_layers):
        ours = filled(block, f"blocks.{index}")(ours)
        theirs = model.block(index, last, theirs, step_tokens)
    filled(head, "head")

    def our_logits(hidden: Tensor) -> Tensor:
        return embedding.logits(head(hidden)) if config.tied_embeddings else head(hidden)

    if config.tied_embeddings:
        filled(embedding, "embedding")
    return float(_worst(ours, theirs, our_logits, model.output(), config))


@torch.no_grad()
def compare_greedy(
    decoder: Decoder, model: Any, prompt: Tensor, num_tokens: int = NEW_TOKENS
) -> None:
    """Both models' greedy continuations of prompt [1, T], by their caches, must be equal.

    Where the two likeliest tokens are as near as the tolerance either may come first; the
    comparison then goes on from the stock model's choice.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # no end token: all are wanted
    settings = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    mask = torch.ones_like(prompt)
    whole = model.generate(prompt, attention_mask=mask, generation_config=settings)
    theirs = whole[0, prompt.shape[1] :].tolist()
    done = 0
    while done < num_tokens:
        start = prompt[0].tolist() + theirs[:done]
        ours = generate(decoder, [start], num_tokens - done)[0]
        equal = common_prefix(ours, theirs[done:])
        done += equal
        if done == num_tokens:
            return
        last = decoder(torch.tensor([start + ours[:equal]]))[0, -1]
        if len(theirs) <= done or last[ours[equal]] - last[theirs[done]] > TOLERANCE:
            raise Mismatch(f"greedy token {done + 1} differs")
        done += 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
