"""Comparing the logits and greedy tokens of the native model with the stock class's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.parity.transformers_reference import Mismatch, bias_from_the_end, hidden_states
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import generate

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

    length = tokens.shape[1]
    scores = 4 * decoder.config.num_heads * length * length
    step_tokens = length if scores <= ATTENTION_BYTES else 1024
    return judged(length, lambda: largest_difference(decoder, model, tokens, step_tokens), exactly)


def judged(
    length: int, plainly: Callable[[], float], exactly: Callable[[], float]
) -> dict[str, float | int | None]:
    """What the comparisons find at this length; the second is made where the first is too much.

    Raises:
        Mismatch: the second finds too much as well.
    """
    plain = plainly()
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
        found = worst_difference(rows, theirs, decoder.logits, output, decoder.config.vocab_size)
        worst = torch.maximum(worst, found)
    return float(worst)


def worst_difference(
    ours: Tensor,
    theirs: Tensor,
    our_logits: Callable[[Tensor], Tensor],
    their_logits: Callable[[Tensor], Tensor],
    num_logits: int | None,
) -> Tensor:
    """Largest |logit difference| of hidden states [1, n, d]; NaN in either gives NaN."""
    portion = max(1, LOGITS_AT_ONCE // (num_logits or 1))
    worst = torch.zeros((), dtype=ours.dtype)
    for our_part, their_part in zip(ours.split(portion, 1), theirs.split(portion, 1), strict=True):
        difference = (our_logits(our_part) - their_logits(their_part)).abs().max()
        worst = torch.maximum(worst, difference)
    return worst


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
    """Number of leading elements that both sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
