"""Text generation with a key/value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.kv_cache import KVCache
from alibi_lm.model.inference.long_scoring import DENSE_UP_TO, pruning_unsupported_reason
from alibi_lm.model.inference.pruned_kv_cache import PrunedKVCache, PrunedKVReport
from alibi_lm.model.init import generator
from alibi_lm.utils.errors import DataError, Problem

PREFILL_CHUNK = 1024


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    pruning_tolerance: float = 0.0,
    report: PrunedKVReport | None = None,
) -> list[list[int]]:
    """Continue each prompt; prompts may differ in length.

    Prompts of one length are run as one batch. Each prompt draws from its own generator, made
    from (seed, its index), so that its continuation does not depend on its neighbors.

    Args:
        decoder: the model.
        prompts: token ids, each at least one.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 takes the most likely token; else logits are divided by it.
        top_k: draw from the k most likely tokens only.
        top_p: draw from the fewest most likely tokens that together have this probability.
        seed: seed of the draws.
        eos_id: token or tokens that end a continuation, which includes them.
        pruning_tolerance: see `decoding_cache`.
        report: takes up what decoding with rings has read.

    Returns:
        The new tokens of each prompt.

    Raises:
        DataError: an empty prompt or a token id that the model does not have.
        ConfigError: more positions than a learned table has.
        ValueError: sampling settings out of range.
    """
    rows = [[int(token) for token in prompt] for prompt in prompts]
    _check(decoder, rows, max_new_tokens, temperature, top_k, top_p)
    stop_ids = _stop_ids(eos_id)
    results: list[list[int]] = [[] for _ in rows]
    for length in sorted({len(row) for row in rows}):
        members = [index for index, row in enumerate(rows) if len(row) == length]
        generators = [generator(seed, index) for index in members]
        batch = torch.tensor([rows[index] for index in members], dtype=torch.int64)
        finished = [False] * len(members)
        cache = decoding_cache(decoder, length + max_new_tokens, pruning_tolerance, report=report)
        for tokens in _steps(
            decoder, batch, max_new_tokens, temperature, top_k, top_p, generators, cache
        ):
            for place, token in enumerate(tokens):
                if not finished[place]:
                    results[members[place]].append(token)
                    finished[place] = token in stop_ids
            if all(finished):
                break
    return results


def stream(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    pruning_tolerance: float = 0.0,
) -> Iterator[int]:
    """The tokens of `generate` for one prompt, each as soon as it is known."""
    row = [int(token) for token in prompt]
    _check(decoder, [row], max_new_tokens, temperature, top_k, top_p)
    stop_ids = _stop_ids(eos_id)
    batch = torch.tensor([row], dtype=torch.int64)
    generators = [generator(seed, 0)]
    cache = decoding_cache(decoder, len(row) + max_new_tokens, pruning_tolerance)
    for tokens in _steps(
        decoder, batch, max_new_tokens, temperature, top_k, top_p, generators, cache
    ):
        yield tokens[0]
        if tokens[0] in stop_ids:
            return


def _stop_ids(eos_id: int | Collection[int] | None) -> Collection[int]:
    if eos_id is None:
        return ()
    return (eos_id,) if isinstance(eos_id, int) else eos_id


def decoding_cache(
    decoder: Decoder,
    num_tokens: int,
    pruning_tolerance: float,
    folder: Path | None = None,
    report: PrunedKVReport | None = None,
) -> KVCache:
    """A cache for `num_tokens` tokens.

    With a pruning tolerance above 0, a model with a pruning bound, and more than `DENSE_UP_TO`
    tokens it is a `PrunedKVCache`: each head and row may leave out `pruning_tolerance` of its
    probability. Memory is bounded, except for the offload store (in `folder` or host memory).
    """
    if (
        pruning_tolerance > 0
        and num_tokens > DENSE_UP_TO
        and pruning_unsupported_reason(decoder) is None
    ):
        return PrunedKVCache(
            decoder.config.num_layers, pruning_tolerance, folder, report or PrunedKVReport()
        )
    return decoder.new_cache()


def prefill(decoder: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """Put tokens [B, T] into the cache, some at a time; the last one's logits [B, V].

    No gradients.
    """
    with torch.no_grad():
        for part in tokens.split(PREFILL_CHUNK, dim=1):
            hidden = decoder.hidden_states(part, cache)
        return decoder.logits(hidden[:, -1])


def _steps(
    decoder: Decoder,
    batch: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: list[torch.Generator],
    cache: KVCache,
) -> Iterator[list[int]]:
    """The next token of every row, again and again."""
    tokens = batch.to(decoder.embedding.weight.device)
    for _ in range(max_new_tokens):
        logits = prefill(decoder, tokens, cache)
        chosen = choose(logits, temperature, top_k, top_p, generators)
        yield chosen.tolist()
        tokens = chosen.to(tokens.device).unsqueeze(1)


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """One token id a row, int64 [B] on the CPU, of logits [B, V].

    top_k is applied first, then top_p to what is left, as in transformers.

    Raises:
        ValueError: a logit is not finite.
    """
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite")
    if temperature == 0:
        return logits.argmax(dim=-1).cpu()
    ordered, ids = logits.double().cpu().sort(dim=-1, descending=True, stable=True)
    # From the largest one, so that a temperature near 0 cannot overflow.
    ordered = (ordered - ordered[:, :1]) / temperature
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    places = [
        torch.multinomial(row, 1, generator=drawn)
        for row, drawn in zip(probabilities, generators, strict=True)
    ]
    return ids.gather(1, torch.stack(places)).squeeze(1)


def _check(
    decoder: Decoder,
    rows: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature} is not a number of at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} is not at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is not in (0, 1]")
    size = decoder.config.vocab_size or 0
    problems = []
    for index, row in enumerate(rows):
        if not row:
            problems.append(Problem(f"prompt {index}", None, "is empty", "give a token"))
        elif not 0 <= min(row) <= max(row) < size:
            problems.append(
                Problem(
                    f"prompt {index}",
                    None,
                    f"has a token id outside 0 to {size - 1}",
                    "use the model's own tokenizer",
                )  # fmt: skip
            )
    if problems:
        raise DataError(*problems)
