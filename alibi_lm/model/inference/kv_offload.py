"""All keys and values of one layer, in host memory or in mapped files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

SEGMENT = 4096
"""Tokens of one segment. Segments are never moved, so a token's cost does not depend on how many
came before it."""


class KVOffloadStore:
    """Keys and values [KV, n, D] by position, written at the end and read anywhere."""

    def __init__(self, folder: Path | None = None) -> None:
        """Keep them in host memory, or in files of `folder`, which exists.

        The files are mapped, so the system may write them out and drop them from memory. They are
        unlinked at once: their space is free again when this object is gone.
        """
        self.length = 0
        self._folder = folder
        self._segments: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.numel() * segment.element_size() for segment in self._segments)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Add the next keys and values [KV, n, D]."""
        done = 0
        while done < keys.shape[1]:
            index, place = divmod(self.length, SEGMENT)
            if index == len(self._segments):
                shape = (2, keys.shape[0], SEGMENT, keys.shape[2])
                self._segments.append(self._segment(shape, keys.dtype))
            count = min(SEGMENT - place, keys.shape[1] - done)
            for store, new in zip(self._segments[index], (keys, values), strict=True):
                store[:, place : place + count] = new[:, done : done + count]
            done += count
            self.length += count

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, stop - first, D]; views where they lie in one segment.

        Raises:
            IndexError: positions that have not been written.
        """
        if not 0 <= first <= stop <= self.length:
            raise IndexError(f"positions {first} to {stop} of {self.length}")
        parts: list[Tensor] = []
        while first < stop or not parts:
            index, place = divmod(first, SEGMENT)
            count = min(SEGMENT - place, stop - first)
            parts.append(self._segments[index][:, :, place : place + count])
            first += count
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return joined[0], joined[1]

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = length
        del self._segments[-(-length // SEGMENT) :]

    def _segment(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._folder is None:
            return torch.empty(shape, dtype=dtype)
        size = torch.Size(shape).numel()
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="keys_values_") as file:
            file.truncate(size * dtype.itemsize)
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
        return mapped.view(shape)
