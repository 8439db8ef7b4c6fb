"""Weights as safetensors files, one shard in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.checkpoint.tensor_file import save_tensors
from alibi_lm.files import write_json

SHARD_BYTES = 5_000_000_000
"""Largest weights file, as the Hugging Face hub recommends; a larger tensor has one of its own."""


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write named tensors in `dtype`: model.safetensors, or numbered shards with their index."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = num_parameters = 0

    def flush() -> None:
        # The number of shards is part of their names and is known at the end.
        path = _partial(folder, len(shards))
        save_tensors(path, pending)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        stored = tensor.detach().to(dtype=dtype, copy=True).contiguous()
        if pending and size + stored.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = stored
        size += stored.nbytes
        total += stored.nbytes
        num_parameters += stored.numel()
    flush()
    if len(shards) == 1:
        os.rename(_partial(folder, 0), folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(_partial(folder, index), folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    metadata = {"total_parameters": num_parameters, "total_size": total}
    index_json = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index_json)


def _partial(folder: Path, index: int) -> Path:
    return folder / f"shard-{index}.partial"
