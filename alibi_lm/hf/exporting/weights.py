"""The weights of a checkpoint as they are exported, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from alibi_lm.checkpoint.fragments import PARAM, FragmentReader
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.progress import Progress

_AT_ONCE = 1 << 22
"""Elements rounded at a time."""


class StepWeights(Mapping[str, Tensor]):
    """fp32 tensors by canonical name, with the values that they have in another type."""

    def __init__(self, reader: FragmentReader, dtype: torch.dtype = torch.float32) -> None:
        """Read from `reader`, rounding to `dtype`."""
        self._reader, self._dtype = reader, dtype
        self._progress: Progress | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.shapes)

    def __len__(self) -> int:
        return len(self._reader.shapes)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: a value is not finite in the type.
        """
        tensor = self._reader.tensor(name)
        self._round(name, tensor.view(-1))
        return tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix, up to its last.

        Raises:
            CheckpointError: a value is not finite in the type.
        """
        height, width = self._reader.shapes[name]
        stop = min(stop, height)
        values = self._reader.read(name, PARAM, start * width, (stop - start) * width)
        self._round(name, values)
        return values.view(stop - start, width)

    @contextmanager
    def progress(self, title: str, passes: int = 1, twice: Collection[str] = ()) -> Iterator[None]:
        """Show how much of the weights has been read, while they are read this many times.

        `twice` names those that are read twice in every pass.
        """
        names = [*self._reader.shapes, *twice]
        numel = sum(math.prod(self._reader.shapes[name]) for name in names)
        with Progress(title, 4 * numel * passes) as self._progress:
            try:
                yield
            finally:
                self._progress = None

    def _round(self, name: str, values: Tensor) -> None:
        """Round values [n] where they lie: a large tensor is not held twice."""
        for part in values.split(_AT_ONCE):
            rounded = part.to(self._dtype)
            # A sum shows what is not finite at a fraction of the time; a large one may be well.
            if not math.isfinite(float(rounded.sum())) and not bool(rounded.isfinite().all()):
                kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "fp32")
                rule = f"has values that {kind} does not hold"
                raise CheckpointError(Problem(name, None, rule, "export it as bf16 or fp32"))
            if self._dtype != torch.float32:
                part.copy_(rounded)
            if self._progress is not None:
                self._progress.advance(4 * part.numel())


def unset_weights(model: ModelConfig) -> dict[str, Tensor]:
    """The model's weights by canonical name, on no device: their shapes."""
    with torch.device("meta"):
        return Decoder(model, seed=None).state_dict()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type and shape and equal bit by bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
