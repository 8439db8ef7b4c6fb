"""The interface between evals and models: losses, log-likelihoods and greedy continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from alibi_lm.config import Config
from alibi_lm.config_loading import build, to_dict
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import decoding_cache
from alibi_lm.model.inference.kv_cache import KVCache
from alibi_lm.model.inference.long_scoring import (
    DENSE_UP_TO,
    long_losses,
    pruning_unsupported_reason,
)
from alibi_lm.model.pruning.bounds import DEFAULT_EPSILON
from alibi_lm.parallel.device import get_device
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError, Problem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PREFILL_TOKENS = 65536
"""Prompt tokens in one forward pass; longer prompts are read in chunks, through the KV cache."""
ANSWERS_DENSE_UP_TO = 8192
"""At or below this length (prompt + answer) attention is dense: pruning saves little there and
costs a call per token."""


@dataclass(frozen=True)
class PromptScores:
    """Closed-set scores and greedy continuations of a batch of prompts."""

    loglikelihoods: Tensor
    """`[B, K]` fp32, nats: log-likelihood of each candidate as the prompt's continuation."""
    generated: Tensor
    """`[B, N]` int64: the greedy continuation."""


def checked_scores(scores: Tensor) -> Tensor:
    """The scores, unchanged.

    Raises:
        CheckpointError: one is not a number, so no token is the likeliest.
    """
    if bool(scores.isnan().any()):
        rule = "gives scores that are not numbers"
        raise CheckpointError(Problem("model", None, rule, "use precision=fp32, or other weights"))
    return scores


class Scorer(Protocol):
    """A causal language model. Input is never truncated: what does not fit is refused."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def dp_size(self) -> int:
        """Copies of the model that share a batch; batches should be a multiple of it."""
        ...

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Losses of tokens[:, 1:] given the tokens before them.

        Args:
            tokens: `[B, T + 1]` int64.

        Returns:
            `[B, T]` fp32 on the CPU, nats.
        """
        ...

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """Closed-set scores and the greedy continuation, from one pass over the prompts.

        Args:
            prompts: `[B, T]` int64.
            candidates: `[B, K, A]` int64, K continuations of A tokens for each prompt.
            max_new_tokens: tokens to generate.
        """
        ...

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of one prompt."""
        ...

    def describe(self) -> dict[str, Any]:
        """The model in the result's JSON: kind, size, precision, device."""
        ...


def generate_one(scorer: Scorer, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy continuation of one prompt, by the scorer's method for batches."""
    prompts = torch.tensor([list(prompt)], dtype=torch.int64)
    candidates = torch.empty(1, 1, 0, dtype=torch.int64)
    scores = scorer.loglikelihood_and_generate(prompts, candidates, max_new_tokens)
    tokens: list[int] = scores.generated[0].tolist()
    return tokens


def check_input(
    tokens: Tensor, num_positions: int, limit: int | None, vocab_size: int, owner: str
) -> None:
    """Raise if a model cannot read these tokens.

    Args:
        tokens: token ids.
        num_positions: positions used by them and by what is generated after them.
        limit: positions that the model has; None if any length is allowed.
        vocab_size: its number of token ids.
        owner: name of the model in the message.

    Raises:
        ConfigError: more positions than there are.
        DataError: a token id that the model does not have.
    """
    if limit is not None and num_positions > limit:
        fix = "give shorter lengths; input is never cut"
        raise ConfigError(Problem("length", num_positions, f"{owner} has {limit} positions", fix))
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        rule = f"has a token id outside 0 to {vocab_size - 1}"
        fix = "use a corpus made with the model's own tokenizer"
        raise DataError(Problem("corpus", None, rule, fix))


class NativeScorer:
    """Scores our own decoder.

    Memory grows linearly with the length: attention works in chunks, and logits are made for some
    positions at a time. With a pruning_tolerance above 0, so does the time of long inputs.

    Attributes:
        pruning_tolerance: largest probability that a head may skip per query; 0 is dense.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: str | None = None,
        pruning_tolerance: float | None = 0.0,
    ) -> None:
        """Score `decoder`; `pruning_tolerance` None: the default where the model allows it.

        Raises:
            ConfigError: a pruning_tolerance above 0 for a model whose attention has no bound.
        """
        self._device = get_device(device)
        self._decoder = decoder.to(self._device).eval()
        reason = pruning_unsupported_reason(self._decoder)
        if pruning_tolerance and reason is not None:
            raise ConfigError(
                Problem(
                    "pruning_tolerance", pruning_tolerance, reason, "leave it out, or set it to 0"
                )
            )
        self.pruning_tolerance = (
            (0.0 if reason else DEFAULT_EPSILON) if pruning_tolerance is None else pruning_tolerance
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._decoder.config.vocab_size or 0)

    @property
    def dp_size(self) -> int:
        """One: this process."""
        return 1

    @torch.inference_mode()
    def token_losses(self, tokens: Tensor) -> Tensor:
        """Losses `[B, T]` of tokens[:, 1:], for tokens `[B, T + 1]`.

        Raises:
            ConfigError: more positions than the model has.
            DataError: a token id that the model does not have.
        """
        tokens = self._checked(tokens, tokens.shape[1] - 1)
        if self.pruning_tolerance and tokens.shape[1] - 1 > DENSE_UP_TO:
            rows = (
                long_losses(self._decoder, row[:-1], row[1:], self.pruning_tolerance)
                for row in tokens
            )
            return torch.stack(list(rows))
        return self._decoder.losses(tokens[:, :-1], tokens[:, 1:]).float().cpu()

    @torch.inference_mode()
    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """Closed-set scores and the greedy continuation; the prompts' keys are computed once.

        Raises:
            ConfigError: more positions than the model has.
            DataError: a token id that the model does not have.
        """
        length = prompts.shape[1]
        longest = length + max(candidates.shape[2], max_new_tokens)
        prompts = self._checked(prompts, longest)
        candidates = self._checked(candidates, longest)
        pruning_tolerance = self.pruning_tolerance if longest > ANSWERS_DENSE_UP_TO else 0.0
        cache = decoding_cache(self._decoder, longest, pruning_tolerance)
        first = self._read(prompts, cache)
        scores = []
        for choice in candidates.unbind(1):
            scores.append(self._continuation(choice, first, cache))
            cache.truncate(length)
        return PromptScores(
            checked_scores(torch.stack(scores, 1)).cpu(),
            self._greedy(first, cache, max_new_tokens).cpu(),
        )

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of one prompt."""
        return generate_one(self, prompt, max_new_tokens)

    def describe(self) -> dict[str, Any]:
        """Kind, size, arithmetic and device."""
        parameter = next(self._decoder.parameters())
        return {
            "kind": "native",
            "num_parameters": self._decoder.num_parameters(),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": self._device.type,
            "pruning_tolerance": self.pruning_tolerance,
            "scaling": to_dict(self._decoder.config.scaling),
        }

    def _checked(self, tokens: Tensor, num_positions: int) -> Tensor:
        limit = self._decoder.config.max_positions
        check_input(tokens, num_positions, limit, self.vocab_size, "the model")
        return tokens.to(self._device)

    def _read(self, prompts: Tensor, cache: KVCache) -> Tensor:
        """Read prompts into the cache; log-probabilities `[B, V]` fp32 of the token after."""
        piece = max(1, PREFILL_TOKENS // prompts.shape[0])
        for tokens in prompts.split(piece, dim=1):
            hidden = self._decoder.hidden_states(tokens, cache)
        return checked_scores(self._decoder.logits(hidden[:, -1]).float().log_softmax(-1))

    def _continuation(self, choice: Tensor, first: Tensor, cache: KVCache) -> Tensor:
        """Log-likelihood `[B]` of continuations `[B, A]` of what the cache holds."""
        if choice.shape[1] == 0:
            return first.new_zeros(choice.shape[0])
        total = first.gather(1, choice[:, :1]).squeeze(1)
        if choice.shape[1] == 1:
            return total
        return total - self._decoder.losses(choice[:, :-1], choice[:, 1:], cache).sum(1)

    def _greedy(self, first: Tensor, cache: KVCache, max_new_tokens: int) -> Tensor:
        """Most likely tokens `[B, N]` after what the cache holds."""
        scores, new = first, []
        for index in range(max_new_tokens):
            new.append(scores.argmax(-1))
            if index + 1 < max_new_tokens:
                scores = self._read(new[-1][:, None], cache)
        return torch.stack(new, 1) if new else first.new_empty(len(first), 0, dtype=torch.int64)


class DecoderSource(Protocol):
    """A source of our own decoder: a checkpoint, or an imported folder."""

    @property
    def config(self) -> Config:
        """The config of its run."""
        ...

    def decoder(
        self, dtype: torch.dtype = ..., model: ModelConfig | None = ..., tp: ParallelDim = ...
    ) -> Decoder:
        """The model, or this rank's slice of it; `model` replaces the config's own."""
        ...


def native_scorer(
    source: DecoderSource,
    precision: str,
    pruning_tolerance: float | None = 0.0,
    scaling: dict[str, Any] | None = None,
    tp: ParallelDim = NO_PARALLEL,
    device: str | None = None,
) -> NativeScorer:
    """A scorer of a checkpoint or an imported folder, with its own scaling of positions or another.

    `pruning_tolerance` is as `NativeScorer` takes it. Every rank of `tp` gives the same results.

    `device` is as `get_device` takes it.

    Linear biases stay fp32 whatever the precision: attention computes them from fp32 slopes.

    Raises:
        ConfigError: pruning_tolerance above 0 for a model that has no bound, or a scaling that the
            model cannot have.
    """
    model = None
    if scaling is not None:
        model = build(ModelConfig, to_dict(source.config.model) | {"scaling": scaling})
    decoder = source.decoder(dtype=DTYPES[precision], model=model, tp=tp)
    return NativeScorer(decoder, device, pruning_tolerance)
