"""Which elements of a whole tensor a tensor-parallel rank holds; a split is stated here alone.

Every split parameter carries a `Shard`. Initialization takes the rank's slice of the whole value
by it, and checkpoints store the rank's elements under their coordinates in the whole tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

_READ_AT_ONCE = 1 << 24
"""Elements of a whole tensor from which strided runs are picked at a time."""


@dataclass(frozen=True)
class StridedSlice:
    """Elements of a flattened whole tensor: runs of `length`, whose starts lie `stride` apart.

    Element i is at start + (i // length) * stride + i % length; the last run may be cut short.
    """

    start: int
    numel: int
    length: int
    stride: int

    @staticmethod
    def contiguous(start: int, numel: int) -> StridedSlice:
        """A single run."""
        return StridedSlice(start, numel, numel, numel)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is a single run."""
        return self.numel <= self.length


@dataclass(frozen=True)
class Interval:
    """Indices [start, start + length) of one dimension of a whole tensor."""

    start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """A rank's part of a whole tensor: intervals of one dimension, concatenated."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    """The dimension that is split."""
    intervals: tuple[Interval, ...]
    """The intervals that the rank holds, in its order."""
    length: int
    """The rank's indices of that dimension; those beyond the intervals are padding, always 0."""
    is_primary_copy: bool = True
    """Whether norms and checkpoints take these elements from this rank; of several ranks with the
    same elements, one is primary."""
    name: str | None = None
    """Last part of the whole tensor's name, where the rank's parameter is called otherwise."""

    def canonical_name(self, name: str) -> str:
        """The whole tensor's name, given the rank's parameter's."""
        return name if self.name is None else f"{name.rpartition('.')[0]}.{self.name}"

    def take(self, whole: Tensor) -> Tensor:
        """The rank's part of a whole tensor, with zeros as padding."""
        parts = [whole.narrow(self.dim, part.start, part.length) for part in self.intervals]
        missing = self.length - sum(part.length for part in self.intervals)
        if missing:
            shape = [*self.shape[: self.dim], missing, *self.shape[self.dim + 1 :]]
            parts.append(whole.new_zeros(shape))
        return torch.cat(parts, self.dim)

    def slices(self, start: int, numel: int) -> Iterator[tuple[int, StridedSlice]]:
        """Where elements [start, start + numel) of the flattened part lie in the whole tensor.

        Yields (first element in the part, run in the whole tensor), without the padding.
        """
        inner = math.prod(self.shape[self.dim + 1 :])
        if math.prod(self.shape[: self.dim]) > 1:
            yield from self._strided(start, numel, inner)
            return
        low = 0
        for part in self.intervals:
            high = low + part.length * inner
            first, last = max(start, low), min(start + numel, high)
            if first < last:
                yield first, StridedSlice.contiguous(part.start * inner + first - low, last - first)
            low = high

    def _strided(self, start: int, numel: int, inner: int) -> Iterator[tuple[int, StridedSlice]]:
        (part,) = self.intervals
        assert part.length == self.length, "padding of an inner dimension"
        length, stride = self.length * inner, self.shape[self.dim] * inner
        row, inside = divmod(start, length)
        place = row * stride + part.start * inner
        if inside:
            count = min(length - inside, numel)
            yield start, StridedSlice.contiguous(place + inside, count)
            start, numel, place = start + count, numel - count, place + stride
        if numel > length:
            yield start, StridedSlice(place, numel, length, stride)
        elif numel:
            yield start, StridedSlice.contiguous(place, numel)


def mark(parameter: Tensor, shard: Shard) -> None:
    """State how a parameter is split; DeepSpeed's norms read the second attribute."""
    parameter.shard = shard  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = shard.is_primary_copy  # type: ignore[attr-defined]


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """How a parameter is split; None where every rank holds all of it."""
    return cast("Shard | None", getattr(parameter, "shard", None))


class StridedReader(ABC):
    """A source of named tensors that reads any part of them."""

    @abstractmethod
    def read(self, name: str, kind: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a flattened whole tensor, fp32 `[numel]`."""

    def read_slice(self, name: str, kind: str, strided: StridedSlice) -> torch.Tensor:
        """The elements of a run of a flattened whole tensor, fp32 `[strided.numel]`.

        Of strided runs, at most `_READ_AT_ONCE` elements of the tensor (or one run) are held.
        """
        if strided.is_contiguous:
            return self.read(name, kind, strided.start, strided.numel)
        result = torch.empty(strided.numel, dtype=torch.float32)
        step = max(1, _READ_AT_ONCE // strided.stride)
        for first in range(0, -(-strided.numel // strided.length), step):
            out = result[first * strided.length : (first + step) * strided.length]
            count, rest = divmod(out.numel(), strided.length)
            numel = (
                (count - 1) * strided.stride + strided.length
                if not rest
                else count * strided.stride + rest
            )
            block = self.read(name, kind, strided.start + first * strided.stride, numel)
            if count:
                shape, strides = (count, strided.length), (strided.stride, 1)
                out[: count * strided.length].view(shape).copy_(block.as_strided(shape, strides))
            if rest:
                out[count * strided.length :] = block[count * strided.stride :]
        return result
