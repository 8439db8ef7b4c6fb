"""Writing safetensors files with the permissions that the user's other files get."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from alibi_lm.utils.files import sync

_AT_ONCE = 1 << 22
"""Elements converted to bytes at a time."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to `path`.

    safetensors makes a file that its owner alone can read; a run folder is shared by a team.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of the types in a safetensors file."""
_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def write_stream(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    blocks: Iterable[Tensor],
    kind: str = "F32",
) -> dict[str, Any]:
    """Write tensors whose elements come in blocks, and return the file's size and sha256.

    The library's own writer takes all tensors of a file at once. The format: 8 bytes with the
    header's length, the header as JSON padded by spaces, the tensors' bytes. See
    https://github.com/huggingface/safetensors#format.

    Args:
        path: the file.
        shapes: shape of each tensor, in order.
        blocks: their elements in the type to be stored, one tensor after another.
        kind: that type's name in the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + _BYTES[kind] * math.prod(shape)
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            size += file.write(block)
            digest.update(block)
        for tensor in blocks:
            assert NAMES[tensor.dtype] == kind
            for part in tensor.reshape(-1).split(_AT_ONCE):
                data = _little_endian(part)
                size += file.write(data)
                digest.update(data)
    assert size == 8 + len(text) + end, "blocks do not make up the shapes"
    sync(path)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _little_endian(values: Tensor) -> bytes:
    data = values.contiguous().view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, values.element_size())[:, ::-1]
    return bytes(data.tobytes())
