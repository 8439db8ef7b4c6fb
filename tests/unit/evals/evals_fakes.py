"""Steps, corpora, a tokenizer and models whose behavior is known by construction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.data.indexed import TokenFileWriter
from alibi_lm.evals.models.scorer import PromptScores
from alibi_lm.model.decoder import Decoder

VOCAB_SIZE = 4096
EOS = 1


class WordTokenizer:
    """Words with their space, newlines, and digits one by one; ids are given at first sight."""

    vocab_size = VOCAB_SIZE
    eos_id = EOS
    stop_ids = (EOS,)

    def __init__(self) -> None:
        self._pieces = ["<unk>", "</s>"]
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [self._id(piece) for piece in re.findall(r"\n| ?[A-Za-z]+| ?[0-9]|.", text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; control tokens have none."""
        return "".join(self._pieces[i] for i in ids if 1 < i < len(self._pieces))

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


@dataclass
class FakeStep:
    """What evals use of a checkpoint."""

    run_folder: Path
    config: Config
    fake_tokenizer: Any = None
    fake_decoder: Decoder | None = None
    step: int = 7
    digest: str = "d1"
    meta: dict[str, Any] = field(
        default_factory=lambda: {
            "tokens": 123456,
            "parameters": {"embedding.weight": [10, 4], "head.norm.weight": [4]},
            "versions": {"alibi_lm": "0.1.0", "torch": "2.13.0"},
            "layout": {"world_size": 2, "zero_stage": 1},
            "saved_at": "2026-01-02T03:04:05Z",
        }
    )

    def weights_digest(self) -> str:
        """As a step's of its weights."""
        return self.digest

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.run_folder / "checkpoints" / "step_00000007"

    @property
    def evals_folder(self) -> Path:
        """Where results go."""
        return self.run_folder / "evals" / "step_00000007"

    @property
    def hf_folder(self) -> Path:
        """Where the export lies."""
        return self.run_folder / "hf" / "step_00000007"

    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return self.fake_tokenizer

    def decoder(self, dtype: torch.dtype = torch.float32, **_: Any) -> Decoder:
        """The model."""
        assert self.fake_decoder is not None
        return self.fake_decoder.to(dtype).eval()


def fake_step(folder: Path, prefixes: Sequence[Path], length: int = 128, **kwargs: Any) -> Any:
    """A step of a run trained at `length`. Typed Any: it stands for a Checkpoint."""
    raw = {
        "run": {"dir": str(folder / "run")},
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB_SIZE},
        "data": {
            "corpora": [{"prefix": "train"}],
            "validation": [str(prefix) for prefix in prefixes],
        },
        "train": {"sequence_length": length},
    }
    return FakeStep(folder / "run", build(Config, raw), **kwargs)


def write_documents(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """A token file of the given documents; returns its prefix."""
    writer = TokenFileWriter(prefix, np.uint16)
    for document in documents:
        writer.add_document(list(document))
    writer.finish()
    return prefix


def code_text(seed: int, num_lines: int) -> str:
    """Lines that look like code: words, numbers, indents."""
    generator = np.random.default_rng(seed)
    words = [hashlib.sha256(bytes([i])).hexdigest()[:6].translate(_LETTERS) for i in range(60)]
    lines = []
    for _ in range(num_lines):
        count = int(generator.integers(1, 12))
        line = " ".join(words[i] for i in generator.integers(0, 60, count))
        lines.append(f"{line} {int(generator.integers(0, 2000))}")
    return "\n".join(lines) + "\n"


_LETTERS = str.maketrans("0123456789", "ghijklmnop")


class PlantedLosses:
    """Losses by a rule of (tokens, position in the window); answers as a uniform model's."""

    vocab_size = VOCAB_SIZE
    dp_size = 1

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def token_losses(self, tokens: Tensor) -> Tensor:
        """`rule(targets [B, T], positions [T])`."""
        positions = torch.arange(tokens.shape[1] - 1)
        losses: Tensor = self._rule(tokens[:, 1:], positions)
        return losses.float().expand(tokens.shape[0], -1)

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """All candidates alike; generates zeros."""
        shape = candidates.shape[:2]
        return PromptScores(
            torch.zeros(shape), torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64)
        )

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Zeros."""
        return [0] * max_new_tokens

    def describe(self) -> dict[str, Any]:
        """A name."""
        return {"kind": "planted"}


class CopyingScorer(PlantedLosses):
    """Repeats what followed the last tokens before, at most `context_limit` tokens ago."""

    def __init__(self, context_limit: int | None = None, context: int = 3) -> None:
        super().__init__(lambda targets, positions: torch.ones(targets.shape))
        self._context_limit = context_limit
        self._context = context

    def _copy(self, prompt: list[int], count: int) -> list[int]:
        tail = prompt[-self._context :]
        nearest = 0 if self._context_limit is None else max(0, len(prompt) - self._context_limit)
        for end in range(len(prompt) - 1, nearest + self._context - 1, -1):
            if prompt[end - self._context : end] == tail:
                return prompt[end : end + count]
        return [0] * count

    def loglikelihood_and_generate(
        self, prompts: Tensor, candidates: Tensor, max_new_tokens: int
    ) -> PromptScores:
        """Candidates score by how many tokens the copy shares with them."""
        copies = torch.tensor(
            [self._copy(prompt, candidates.shape[2]) for prompt in prompts.tolist()]
        )
        shared = (candidates == copies[:, None]).sum(2).float()
        return PromptScores(shared - candidates.shape[2], copies[:, :max_new_tokens])
