"""One checkpoint opened for reading: by evals, generation, export and `init_from`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alibi_lm.checkpoint.folder import (
    CONFIG,
    META,
    TOKENIZER,
    read_meta,
    resolve_step,
    run_of,
    step_name,
    verify,
)
from alibi_lm.checkpoint.fragments import FragmentReader
from alibi_lm.config import Config, load_config
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder, filled_decoder
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `open_checkpoint` opens one."""

    folder: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.meta["step"])

    @property
    def run_folder(self) -> Path:
        """The run that the checkpoint belongs to; the step folder itself where it stands alone."""
        return run_of(self.folder)

    @property
    def evals_folder(self) -> Path:
        """Where this step's evals are written."""
        return self.run_folder / "evals" / step_name(self.step)

    @property
    def hf_folder(self) -> Path:
        """Where this step is exported by default."""
        return self.run_folder / "hf" / step_name(self.step)

    @property
    def digest(self) -> str:
        """SHA-256 of meta.json, which itself holds the digest of every file."""
        return hashlib.sha256((self.folder / META).read_bytes()).hexdigest()

    def weights_digest(self, advance: Callable[[int], None] | None = None) -> str:
        """SHA-256 over names and fp32 values of all weights, whatever files hold them.

        `advance` is called with the bytes of each tensor.
        """
        digest = hashlib.sha256()
        with self.reader() as reader:
            for name in sorted(reader.shapes):
                tensor = reader.tensor(name)
                digest.update(f"{name}{list(tensor.shape)}".encode())
                digest.update(tensor.numpy().astype("<f4", copy=False).data)
                if advance is not None:
                    advance(4 * tensor.numel())
                del tensor  # before the next one is read
        return digest.hexdigest()

    @cached_property
    def config(self) -> Config:
        """The run's resolved config."""
        return load_config(self.folder / CONFIG)

    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer, or None where it was trained without one."""
        path = self.folder / TOKENIZER
        return load_tokenizer(path) if path.is_dir() else None

    def reader(self) -> FragmentReader:
        """The stored states, to be used as a context manager."""
        return FragmentReader(self.folder, self.meta)

    def weights(self) -> dict[str, torch.Tensor]:
        """The fp32 weights by canonical parameter name."""
        with self.reader() as reader:
            return dict(reader.tensors())

    def decoder(
        self,
        dtype: torch.dtype = torch.float32,
        model: ModelConfig | None = None,
        tp: ParallelDim = NO_PARALLEL,
    ) -> Decoder:
        """The model with this step's weights in `dtype`, in evaluation mode.

        `model` replaces the run's own config of it, with settings that change no parameter. Each
        rank of `tp` reads its slice alone.
        """
        with self.reader() as reader:
            return filled_decoder(model or self.config.model, reader, dtype, tp)


def open_checkpoint(path: str | Path, *, check: bool = True) -> Checkpoint:
    """Open a run folder's newest complete step, or a step folder.

    `check` compares every file with its sha256 first.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file of it is damaged.
    """
    folder = resolve_step(Path(path))
    return Checkpoint(folder, verify(folder) if check else read_meta(folder))
