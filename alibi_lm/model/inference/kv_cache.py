"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerKVCache:
    """Keys and values of one block, in buffers that double when full."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, KV, T, D] each, and give all so far as views [B, KV, length, D].

        Raises:
            ValueError: the batch, heads or dtype are not those of the tokens before, or a
                gradient is wanted through the cache.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("a cache carries no gradient: decode under torch.no_grad()")
        self._keys = self._stored(self._keys, keys)
        self._values = self._stored(self._values, values)
        self.length += keys.shape[2]
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        self.length = length

    def _stored(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        batch, heads, length, width = new.shape
        if buffer is not None and (
            (buffer.shape[0], buffer.shape[1], buffer.shape[3], buffer.dtype)
            != (batch, heads, width, new.dtype)
        ):
            raise ValueError(
                f"the cache holds {tuple(buffer.shape)} {buffer.dtype}, "
                f"not {tuple(new.shape)} {new.dtype}"
            )
        needed = self.length + length
        if buffer is None or needed > buffer.shape[2]:
            capacity = max(needed, 2 * self.length, 64)
            grown = new.new_empty(batch, heads, capacity, width)
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : needed] = new
        return buffer


class KVCache:
    """The caches of all blocks, in order."""

    def __init__(self, num_layers: int) -> None:
        self.layers: Sequence[LayerKVCache] = [LayerKVCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens that the cache holds."""
        return self.layers[0].length

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on.

        Raises:
            ValueError: the cache holds fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cut to {length}")
        for layer in self.layers:
            layer.truncate(length)
