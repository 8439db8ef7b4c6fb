"""Scoring with a class of `transformers`, in memory that grows linearly with the length.

A row too large for one pass is scored in chunks through the model's KV cache. So neither logits
(length x vocabulary) nor attention scores (length x length) are ever held whole. A short input is
scored both ways first; a class whose chunks give other logits gets every input whole.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.evals.models.scorer import PromptScores, check_input, checked_scores, generate_one
from alibi_lm.parallel.device import get_device
from alibi_lm.utils.errors import CheckpointError, ConfigError, Problem

LOGITS_AT_ONCE = 1 << 27
"""Logits that one pass may make."""
SCORES_AT_ONCE = 1 << 28
"""Attention scores that one pass may make in a layer."""
PROBE_TOKENS = 48
_SAME = 1e-3
_UNMOVED = 1e-5
"""Largest difference of two passes of one shape."""
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the input length."""
_NO_PLACE = re.compile(r"index .*out of (range|bounds)")
"""torch's message for a position beyond a table."""


class TransformersScorer:
    """Scores any causal language model of `transformers`.

    Attributes:
        length_dependent: whether a token's loss depends on the number of tokens after it, because
            the class derives its rotary frequencies from the length of the input. Then rows must
            not be padded, and every input goes through the class in one pass.
    """

    def __init__(
        self,
        model: Any,
        max_input_length: int | None,
        device: str | None = None,
        *,
        logits_at_once: int = LOGITS_AT_ONCE,
        scores_at_once: int = SCORES_AT_ONCE,
    ) -> None:
        """Score `model`.

        Args:
            model: as `AutoModelForCausalLM` gives it.
            max_input_length: longest input of its class in tokens; None if any length is allowed.
            device: as `get_device` takes it.
            logits_at_once: logits that one pass may make.
            scores_at_once: attention scores that one pass may make in a layer.

        Raises:
            CheckpointError: its class reads the tokens that are to be predicted.
        """
        self._device = get_device(device)
        self._model = model.to(self._device).eval()
        self._longest = max_input_length
        self._logits_at_once, self._scores_at_once = logits_at_once, scores_at_once
        self._heads = int(getattr(model.config, "num_attention_heads", None) or 1)
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.length_dependent = _depend_on_length(getattr(model.config, "rope_parameters", None))
        self._chunkable: bool | None = None
        self._check_causal()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def dp_size(self) -> int:
        """One: this process."""
        return 1

    @torch.inference_mode()
    def token_losses(self, tokens: Tensor) -> Tensor:
        """Losses `[B, T]` of tokens[:, 1:], for tokens `[B, T + 1]`.

        Raises:
            ConfigError: more positions than the class has.
            DataError: a token id that the model does not have.
        """
        length = tokens.shape[1] - 1
        tokens = self._checked(tokens, length)
        rows = min(
            self._logits_at_once // (length * self.vocab_size),
            self._scores_at_once // (self._heads * length * length),
        )
        if rows >= 1 or not self._chunks_agree():
            parts = [self._whole(part) for part in tokens.split(max(1, rows))]
        else:
            parts = [self._chunked(row[None]) for row in tokens]
        return torch.cat(parts).cpu()

    @torch.inference_mode()
    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """Closed-set scores and the greedy continuation; the prompts' keys are computed once.

        Raises:
            ConfigError: more positions than the class has.
            DataError: a token id that the model does not have.
        """
        longest = prompts.shape[1] + max(candidates.shape[2], max_new_tokens)
        prompts = self._checked(prompts, longest)
        candidates = self._checked(candidates, longest)
        state = self._prefill(prompts) if self._chunks_agree() else _Uncached(self, prompts)
        scores = [state.log_likelihood(choice) for choice in candidates.unbind(1)]
        loglikelihoods = checked_scores(torch.stack(scores, 1))
        return PromptScores(loglikelihoods.cpu(), state.greedy(max_new_tokens).cpu())

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of one prompt."""
        return generate_one(self, prompt, max_new_tokens)

    def describe(self) -> dict[str, Any]:
        """Kind, class, size, arithmetic and device."""
        parameters = list(self._model.parameters())
        return {
            "kind": "hf",
            "class": type(self._model).__name__,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
            "device": self._device.type,
        }

    def _checked(self, tokens: Tensor, num_positions: int) -> Tensor:
        owner = type(self._model).__name__
        check_input(tokens, num_positions, self._longest, self.vocab_size, owner)
        self._raise_max_seq_len(num_positions)
        return tokens.to(self._device)

    def _raise_max_seq_len(self, num_positions: int) -> None:
        """Raise MPT's `max_seq_len`: it only sizes the bias, and the class crashes past it."""
        config = self._model.config
        if config.model_type == "mpt" and num_positions > config.max_seq_len:
            config.max_seq_len = 1 << (num_positions - 1).bit_length()

    def forward(self, tokens: Tensor, cache: Any = None, *, last: bool = False) -> tuple[Any, Any]:
        """Logits fp32 of tokens `[B, n]` (with `last`, of the last one) and the cache after them.

        `cache` is what an earlier call gave, or False to keep none.
        """
        settings: dict[str, Any] = {"use_cache": cache is not False}
        if cache:
            settings |= cache
        if last and self._keeps_last:
            settings["logits_to_keep"] = 1
        if self.length_dependent:
            # Such a class keeps the frequencies of its longest input until it gets a short one.
            self._model(input_ids=tokens[:1, :1], use_cache=False)
        try:
            out = self._model(input_ids=tokens, **settings)
        except (IndexError, RuntimeError) as error:
            if not _NO_PLACE.search(str(error)):
                raise
            self._refuse(tokens.shape[1])
        name = "cache" if "cache" in out else "past_key_values"  # renamed in transformers 5
        kept = out.get(name)
        logits = out.logits[:, -1:] if last else out.logits
        return logits.float(), None if kept is None else {name: kept}

    def _refuse(self, length: int) -> NoReturn:
        rule = f"{type(self._model).__name__} has no place for so many tokens"
        fix = "give shorter lengths; input is never cut"
        raise ConfigError(Problem("length", length, rule, fix))

    @torch.inference_mode()
    def _check_causal(self) -> None:
        """Refuse a class whose tokens attend to later ones, such as BERT as an encoder."""
        tokens = self._probe_tokens()
        half = tokens.shape[1] // 2
        if not half:
            return
        other = tokens.clone()
        other[:, half:] = (tokens[:, half:] + 1) % self.vocab_size
        first, second = (self.forward(ids, False)[0][:, :half] for ids in (tokens, other))
        if not self._same_logits(first, second, _UNMOVED):
            name = type(self._model).__name__
            rule = f"is no causal language model: {name} reads the tokens after each position"
            fix = "name one that reads from left to right (BERT's kind: is_decoder in its config)"
            raise CheckpointError(Problem("hf", None, rule, fix))

    def _probe_tokens(self) -> Tensor:
        """A few token ids `[1, n]` to test a class with."""
        count = min(PROBE_TOKENS, self._longest or PROBE_TOKENS)
        self._raise_max_seq_len(count)
        return torch.arange(count, device=self._device)[None] * 7919 % self.vocab_size

    def _same_logits(self, logits: Tensor, others: Tensor, within: float = _SAME) -> bool:
        """Whether logits agree up to rounding; NaNs count as equal."""
        apart = (logits.log_softmax(-1) - others.log_softmax(-1)).abs().nan_to_num(0.0).max()
        coarse = next(self._model.parameters()).dtype != torch.float32
        return bool(apart < (100 if coarse else 1) * within)

    def _whole(self, tokens: Tensor) -> Tensor:
        """Losses `[B, T]`, each row in one pass."""
        logits, _ = self.forward(tokens[:, :-1], False)
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")

    def _chunked(self, tokens: Tensor) -> Tensor:
        """Losses `[B, T]`, in chunks."""
        losses, cache, first = [], None, 0
        for part in self._split(tokens[:, :-1], logits=True):
            logits, cache = self.forward(part, cache)
            targets = tokens[:, first + 1 : first + 1 + part.shape[1]]
            losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
            first += part.shape[1]
        return torch.cat(losses, dim=1)

    def _split(self, tokens: Tensor, *, logits: bool) -> Iterator[Tensor]:
        """Tokens `[B, T]` in chunks within the limits."""
        count, length = tokens.shape
        size = self._scores_at_once // (count * self._heads * length)
        if logits:
            size = min(size, self._logits_at_once // (count * self.vocab_size))
        yield from tokens.split(max(1, size), dim=1)

    def _prefill(self, prompts: Tensor) -> _Cached:
        cache = None
        for part in self._split(prompts, logits=not self._keeps_last):
            logits, cache = self.forward(part, cache, last=True)
        return _Cached(self, logits[:, -1].log_softmax(-1), cache, prompts.shape[1])

    def _chunks_agree(self) -> bool:
        """Whether the class gives the same logits in chunks as in one pass."""
        if self._chunkable is None:
            tokens = self._probe_tokens()
            half = tokens.shape[1] // 2
            whole, _ = self.forward(tokens, False)
            logits, cache = self.forward(tokens[:, :half])
            self._chunkable = cache is not None and not self.length_dependent
            if self._chunkable:
                more, _ = self.forward(tokens[:, half:], cache)
                self._chunkable = self._same_logits(torch.cat([logits, more], dim=1), whole)
        return self._chunkable


class _Cached:
    """Prompts in a cache."""

    def __init__(self, scorer: TransformersScorer, first: Tensor, cache: Any, length: int) -> None:
        self._scorer, self._first, self._cache, self._length = scorer, first, cache, length

    def log_likelihood(self, choice: Tensor) -> Tensor:
        """`[B]` of continuations `[B, A]`."""
        if choice.shape[1] == 0:
            return self._first.new_zeros(choice.shape[0])
        total = self._first.gather(1, choice[:, :1]).squeeze(1)
        if choice.shape[1] == 1:
            return total
        with _Fork(self._cache, choice.shape[1] - 1) as cache:
            logits, _ = self._scorer.forward(choice[:, :-1], cache)
        rest = logits.log_softmax(-1).gather(2, choice[:, 1:, None]).squeeze(2)
        return total + rest.sum(1)

    def greedy(self, count: int) -> Tensor:
        """Likeliest tokens `[B, count]`; the cache is used up."""
        scores, new, cache = self._first, [], self._cache
        for index in range(count):
            new.append(checked_scores(scores).argmax(-1))
            if index + 1 < count:
                logits, cache = self._scorer.forward(new[-1][:, None], cache, last=True)
                scores = logits[:, -1]
        return torch.stack(new, 1) if new else scores.new_empty(len(scores), 0, dtype=torch.int64)


class _Fork:
    """A context manager that lends a cache and restores it afterwards."""

    def __init__(self, cache: Any, num_tokens: int) -> None:
        self._cache, self._num_tokens = cache, num_tokens
        (inner,) = cache.values()
        kinds = {type(layer).__name__ for layer in getattr(inner, "layers", ())}
        # Other layers, such as those of sliding windows, forget what a longer input pushes out.
        self._crops = kinds == {"DynamicLayer"}

    def __enter__(self) -> Any:
        return self._cache if self._crops else copy.deepcopy(self._cache)

    def __exit__(self, *_: object) -> None:
        if self._crops:
            (inner,) = self._cache.values()
            inner.crop(-self._num_tokens)


class _Uncached:
    """Prompts of a class without a usable cache: every call is a whole pass."""

    def __init__(self, scorer: TransformersScorer, prompts: Tensor) -> None:
        self._scorer, self._prompts = scorer, prompts

    def log_likelihood(self, choice: Tensor) -> Tensor:
        """`[B]` of continuations `[B, A]`."""
        count = choice.shape[1]
        if count == 0:
            return self._prompts.new_zeros(len(self._prompts), dtype=torch.float32)
        tokens = torch.cat([self._prompts, choice], dim=1)
        logits, _ = self._scorer.forward(tokens[:, :-1], False)
        scores = logits[:, -count:].log_softmax(-1).gather(2, choice[..., None])
        return scores.squeeze(2).sum(1)

    def greedy(self, count: int) -> Tensor:
        """Likeliest tokens `[B, count]`."""
        tokens = self._prompts
        for _ in range(count):
            logits, _ = self._scorer.forward(tokens, False, last=True)
            new = checked_scores(logits[:, -1]).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens[:, self._prompts.shape[1] :]


def _depend_on_length(parameters: Any) -> bool:
    """Whether rotary parameters, of all layers or by kind of layer, depend on the input length."""
    if not isinstance(parameters, dict):
        return False
    kind = parameters.get("rope_type")
    return kind in _BY_LENGTH or any(_depend_on_length(nested) for nested in parameters.values())
