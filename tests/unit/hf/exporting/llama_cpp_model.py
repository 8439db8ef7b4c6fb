"""An exported folder converted by llama.cpp's own script, and its model beside ours."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alibi_lm.model.decoder import Decoder

CONVERTER = shutil.which("convert_hf_to_gguf.py")
NO_LEADING_SPACE = {"tokenizer.ggml.add_space_prefix": False}


def convert(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the converter as a user would; the file is FOLDER.gguf, in fp32."""
    assert CONVERTER is not None
    out = folder.with_suffix(".gguf")
    command = [sys.executable, CONVERTER, str(folder), "--outtype", "f32", "--outfile", str(out)]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


def load(folder: Path, context: int, **options: Any) -> Any:
    """The converted model, with logits at every position; llama.cpp's defaults otherwise."""
    from llama_cpp import Llama

    return Llama(str(folder.with_suffix(".gguf")), n_ctx=context, n_batch=context, n_threads=1,
                 n_threads_batch=1, logits_all=True, verbose=False,
                 kv_overrides=NO_LEADING_SPACE, **options)  # fmt: skip


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Its most likely tokens after a prompt of ids."""
    model.reset()
    stream = model.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
    return [int(token) for token, _ in zip(stream, range(count), strict=False)]


def losses(model: Any, window: Sequence[int]) -> list[float]:
    """Nats of each token of a window after its first."""
    model.reset()
    model.eval(list(window))
    logits = torch.from_numpy(np.array(model.scores[: len(window) - 1]))
    return _nats(logits, window)


def our_losses(decoder: Decoder, window: Sequence[int]) -> list[float]:
    """The same of our own model."""
    with torch.no_grad():
        return _nats(decoder(torch.tensor([list(window)]))[0, :-1], window)


def _nats(logits: torch.Tensor, window: Sequence[int]) -> list[float]:
    after = torch.tensor(list(window)[1:])
    return torch.nn.functional.cross_entropy(logits.double(), after, reduction="none").tolist()


def perplexities(
    model: Any, decoder: Decoder, tokens: Sequence[int], length: int, windows: int
) -> tuple[float, float]:
    """Its perplexity and ours, over `windows` windows of `length` tokens."""
    parts = [tokens[length * i : length * (i + 1)] for i in range(windows)]
    assert len(parts[-1]) == length
    theirs = [nats for part in parts for nats in losses(model, part)]
    ours = [nats for part in parts for nats in our_losses(decoder, part)]
    return math.exp(sum(theirs) / len(theirs)), math.exp(sum(ours) / len(ours))
