"""The weights of a checkpoint as they are exported, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from alibi_lm.checkpoint.fragments import FragmentReader
from alibi_lm.errors import CheckpointError, Problem
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder


class StepWeights(Mapping[str, Tensor]):
    """fp32 tensors by canonical name, with the values that they have in another type."""

    def __init__(self, reader: FragmentReader, dtype: torch.dtype = torch.float32) -> None:
        """Read from `reader`, rounding to `dtype`."""
        self._reader, self._dtype = reader, dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.shapes)

    def __len__(self) -> int:
        return len(self._reader.shapes)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: a value is not finite in the type.
        """
        rounded = self._reader.tensor(name).to(self._dtype)
        if not bool(rounded.isfinite().all()):
            kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "fp32")
            rule = f"has values that {kind} does not hold"
            raise CheckpointError(Problem(name, None, rule, "export it as bf16 or fp32"))
        return rounded.float()


def unset_weights(model: ModelConfig) -> dict[str, Tensor]:
    """The model's weights by canonical name, on no device: their shapes."""
    with torch.device("meta"):
        return Decoder(model, seed=None).state_dict()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type and shape and equal bit by bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
