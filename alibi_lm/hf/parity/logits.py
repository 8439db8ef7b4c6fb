"""Compare logits and greedy tokens of the native model with the `transformers` reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.parity.transformers_reference import (
    Mismatch,
    bias_zero_at_newest_key,
    hidden_states,
)
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import generate

TOLERANCE = 1e-4
"""Largest allowed difference of two logits."""
NEW_TOKENS = 64
"""Tokens generated greedily."""
STEP_TOKENS = 128
"""Tokens read at once in the fp64 comparison; the bias loses precision with distance from them."""
ATTENTION_BYTES = 1 << 31
"""Largest score matrix of the reference, which holds about four copies."""
LOGITS_AT_ONCE = 1 << 24


@torch.no_grad()
def compare_logits(decoder: Decoder, model: Any, tokens: Tensor) -> dict[str, float | int | None]:
    """Largest logit difference over tokens [1, T].

    `transformers` holds the bias of the whole input in fp32, so past some thousand tokens its
    rounding alone can exceed the tolerance. Such a length is compared again in fp64, reading the
    tokens in small steps through the cache, where the bias of local keys is small and exact.
    """

    def in_fp64() -> float:
        decoder.double()
        model.double()
        with bias_zero_at_newest_key(model):
            found = largest_difference(decoder, model, tokens, STEP_TOKENS)
        decoder.float()
        model.float()
        return found

    length = tokens.shape[1]
    scores = 4 * decoder.config.num_heads * length * length
    step_tokens = length if scores <= ATTENTION_BYTES else 1024
    return checked_difference(
        length, lambda: largest_difference(decoder, model, tokens, step_tokens), in_fp64
    )


def checked_difference(
    length: int, in_fp32: Callable[[], float], in_fp64: Callable[[], float]
) -> dict[str, float | int | None]:
    """Compare in fp32, and in fp64 if that exceeds the tolerance.

    Raises:
        Mismatch: the fp64 difference exceeds the tolerance too.
    """
    plain = in_fp32()
    exact = None
    if not plain <= TOLERANCE:
        exact = in_fp64()
        if not exact <= TOLERANCE:
            rule = f"logits differ by {plain:.3g} at {length:,} tokens, {exact:.3g} in fp64"
            raise Mismatch(f"{rule}, more than {TOLERANCE:g}")
    return {"length": length, "max_difference": plain, "max_difference_fp64": exact}


def largest_difference(decoder: Decoder, model: Any, tokens: Tensor, step_tokens: int) -> float:
    """Largest |logit difference|; the reference reads `step_tokens` at a time.

    NaN in either gives NaN.
    """
    native = decoder.hidden_states(tokens)
    output = model.get_output_embeddings()
    worst = torch.zeros((), dtype=native.dtype)
    for start, reference in hidden_states(model, tokens, step_tokens):
        rows = native[:, start : start + reference.shape[1]]
        found = worst_difference(rows, reference, decoder.logits, output, decoder.config.vocab_size)
        worst = torch.maximum(worst, found)
    return float(worst)


def worst_difference(
    native: Tensor,
    reference: Tensor,
    native_logits: Callable[[Tensor], Tensor],
    reference_logits: Callable[[Tensor], Tensor],
    num_logits: int | None,
) -> Tensor:
    """Largest |logit difference| of hidden states [1, n, d]; NaN in either gives NaN."""
    chunk = max(1, LOGITS_AT_ONCE // (num_logits or 1))
    worst = torch.zeros((), dtype=native.dtype)
    for native_part, reference_part in zip(
        native.split(chunk, 1), reference.split(chunk, 1), strict=True
    ):
        difference = (native_logits(native_part) - reference_logits(reference_part)).abs().max()
        worst = torch.maximum(worst, difference)
    return worst


@torch.no_grad()
def compare_greedy(
    decoder: Decoder, model: Any, prompt: Tensor, num_tokens: int = NEW_TOKENS
) -> None:
    """Both models' greedy continuations of prompt [1, T], with their caches, must be equal.

    Where the two likeliest tokens are within the tolerance, either may come first; the comparison
    then continues from the reference's choice.

    Raises:
        Mismatch: a token differs by more than the tolerance in its logit.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # no end token: all are wanted
    settings = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    mask = torch.ones_like(prompt)
    whole = model.generate(prompt, attention_mask=mask, generation_config=settings)
    reference = whole[0, prompt.shape[1] :].tolist()
    done = 0
    while done < num_tokens:
        start = prompt[0].tolist() + reference[:done]
        native = generate(decoder, [start], num_tokens - done)[0]
        equal = common_prefix(native, reference[done:])
        done += equal
        if done == num_tokens:
            return
        last = decoder(torch.tensor([start + native[:equal]]))[0, -1]
        if len(reference) <= done or last[native[equal]] - last[reference[done]] > TOLERANCE:
            raise Mismatch(f"greedy token {done + 1} differs")
        done += 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that both sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
