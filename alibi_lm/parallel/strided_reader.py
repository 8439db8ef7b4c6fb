"""Reading runs of elements out of stored or computed whole tensors, in bounded memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from alibi_lm.parallel.shard import StridedSlice

_READ_AT_ONCE = 1 << 24
"""Elements of a whole tensor from which strided runs are picked at a time."""


class StridedReader(ABC):
    """A source of named whole tensors that gives any part of them."""

    @abstractmethod
    def read(self, name: str, kind: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a flattened whole tensor, fp32 `[numel]`."""

    def read_slice(self, name: str, kind: str, run: StridedSlice) -> torch.Tensor:
        """The elements of a run of a flattened whole tensor, fp32 `[run.numel]`.

        Of strided runs, at most `_READ_AT_ONCE` elements of the tensor (or one run) are held.
        """
        if run.is_contiguous:
            return self.read(name, kind, run.start, run.numel)
        result = torch.empty(run.numel, dtype=torch.float32)
        step = max(1, _READ_AT_ONCE // run.stride)
        for first in range(0, -(-run.numel // run.length), step):
            out = result[first * run.length : (first + step) * run.length]
            count, rest = divmod(out.numel(), run.length)
            numel = (count - 1) * run.stride + run.length if not rest else count * run.stride + rest
            block = self.read(name, kind, run.start + first * run.stride, numel)
            if count:
                shape, strides = (count, run.length), (run.stride, 1)
                out[: count * run.length].view(shape).copy_(block.as_strided(shape, strides))
            if rest:
                out[count * run.length :] = block[count * run.stride :]
        return result
