"""A run's model and tokenizer together: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.config import Config
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference import generation
from alibi_lm.parallel.device import get_device
from alibi_lm.utils.errors import CheckpointError, Problem


@dataclass(frozen=True, repr=False)
class Run:
    """One checkpoint of a run, ready for use. Make one with `load_run`."""

    checkpoint: Checkpoint
    dtype: torch.dtype = torch.float32
    device: str | None = None
    """As `get_device` takes it."""

    def __repr__(self) -> str:
        """One line: the step folder and the dtype."""
        return f"Run({str(self.checkpoint.folder)!r}, {self.dtype})"

    @property
    def config(self) -> Config:
        """The run's resolved config."""
        return self.checkpoint.config

    @cached_property
    def decoder(self) -> Decoder:
        """The model, in evaluation mode."""
        return self.checkpoint.decoder(self.dtype).to(get_device(self.device))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.

        Raises:
            CheckpointError: it was trained without one.
        """
        tokenizer = self.checkpoint.tokenizer()
        if tokenizer is None:
            fix = "train with data.tokenizer set, or import a folder with its tokenizer"
            folder = str(self.checkpoint.folder)
            raise CheckpointError(Problem(folder, None, "has no tokenizer", fix))
        return tokenizer

    @torch.no_grad()
    def logits(self, text: str) -> Tensor:
        """Logits [T, V] after each token of a text, which has at least one."""
        tokens = torch.tensor([self._ids(text)], device=self.decoder.embedding.weight.device)
        return self.decoder(tokens)[0]

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        pruning_tolerance: float = 0.0,
    ) -> list[str]:
        """What the model writes after each prompt, up to an end token or a text of `stop`.

        Args:
            prompts: texts; an empty one is continued from the end token.
            max_new_tokens: how many tokens to add at most.
            temperature, top_k, top_p, seed: see `generation.generate`.
            stop: texts before which to end.
            pruning_tolerance: see `generation.decoding_cache`.
        """
        ids = [self._ids(prompt) for prompt in prompts]
        continuations = generation.generate(
            self.decoder, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed, eos_id=self.tokenizer.stop_ids,
            pruning_tolerance=pruning_tolerance,
        )  # fmt: skip
        return [
            _cut(self._continuation(start, new), stop)
            for start, new in zip(ids, continuations, strict=True)
        ]

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        pruning_tolerance: float = 0.0,
    ) -> Iterator[str]:
        """The text of `generate` for one prompt, in pieces as soon as they are certain.

        A character whose bytes are not complete is held back, as is what may begin a text of
        `stop`.
        """
        start = self._ids(prompt)
        new: list[int] = []
        sent = 0
        tokens = generation.stream(
            self.decoder, start, max_new_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p, seed=seed, eos_id=self.tokenizer.stop_ids,
            pruning_tolerance=pruning_tolerance,
        )  # fmt: skip
        for token in tokens:
            new.append(token)
            text = self._continuation(start, new)
            cut = _cut(text, stop)
            if len(cut) < len(text):
                yield cut[sent:]
                return
            certain = _certain(text, stop)
            if certain > sent:
                yield text[sent:certain]
                sent = certain
        yield self._continuation(start, new)[sent:]

    def _ids(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt) or [self.tokenizer.eos_id]

    def _continuation(self, start: list[int], new: list[int]) -> str:
        """The text that new tokens add; spaces between the two are as in the whole.

        End tokens have no text here, nor do ids that the model has beyond its tokenizer's.
        """
        shown = [
            [token for token in ids if token not in self.tokenizer.stop_ids
             and token < self.tokenizer.vocab_size]
            for ids in (start, start + new)
        ]  # fmt: skip
        before, whole = map(self.tokenizer.decode, shown)
        return whole[len(before) :]


def load_run(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    check: bool = True,
) -> Run:
    """Open a run folder's newest complete checkpoint, or a step folder.

    Args:
        path: the folder.
        dtype: type to compute in.
        device: for example `cpu` or `cuda:1`; by default an accelerator, if there is one.
        check: whether every file is compared with its sha256 first.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file of it is damaged.
        ConfigError: this machine has no such device.
    """
    get_device(device)  # a mistake is raised here, not at the first use
    return Run(open_checkpoint(path, check=check), dtype, device)


def _cut(text: str, stop: Sequence[str]) -> str:
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(places)] if places else text


def _certain(text: str, stop: Sequence[str]) -> int:
    """How much of a text no further token can take back."""
    end = len(text.rstrip("\ufffd"))
    for word in stop:
        for length in range(min(len(word) - 1, len(text)), 0, -1):
            if text.endswith(word[:length]):
                end = min(end, len(text) - length)
                break
    return end
