"""Weights as safetensors files, one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.checkpoint.safetensors_io import NAMES, write_stream
from alibi_lm.utils.files import write_json

SHARD_BYTES = 5_000_000_000
"""Largest weights file, as the Hugging Face hub recommends; a larger tensor has one of its own."""
_AT_ONCE = 1 << 22
"""Elements rounded at a time."""


def write_shards(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write named tensors in `dtype`: model.safetensors, or numbered shards with their index.

    `shapes` says beforehand what `tensors` will give, in its order.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    stream = iter(tensors)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        part = {name: shapes[name] for name in names}
        write_stream(folder / file, part, _stored(stream, names, dtype), NAMES[dtype])
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) == 1:
        return
    numel = sum(math.prod(shape) for shape in shapes.values())
    metadata = {"total_parameters": numel, "total_size": numel * dtype.itemsize}
    index_json = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index_json)


def _stored(
    stream: Iterator[tuple[str, Tensor]], names: list[str], dtype: torch.dtype
) -> Iterator[Tensor]:
    for expected in names:
        name, tensor = next(stream)
        assert name == expected
        for part in tensor.detach().reshape(-1).split(_AT_ONCE):
            yield part.to(dtype)
