"""The weights of an export: read, rounded and written one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.checkpoint.fragments import PARAM, FragmentReader
from alibi_lm.checkpoint.safetensors_io import NAMES, write_stream
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import write_json
from alibi_lm.utils.progress import Progress

SHARD_BYTES = 5_000_000_000
"""Largest weights file, as the Hugging Face Hub recommends; a larger tensor gets its own file."""
_AT_ONCE = 1 << 22
"""Elements rounded at a time."""


class StepWeights(Mapping[str, Tensor]):
    """Checkpoint tensors by canonical name, rounded to an export's dtype and held as fp32."""

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
        """Show a progress bar while the weights are read `passes` times.

        `twice` names the tensors that each pass reads twice.
        """
        names = [*self._reader.shapes, *twice]
        numel = sum(math.prod(self._reader.shapes[name]) for name in names)
        with Progress(title, 4 * numel * passes) as self._progress:
            try:
                yield
            finally:
                self._progress = None

    def _round(self, name: str, values: Tensor) -> None:
        """Round values [n] in place, so that a large tensor is not held twice."""
        for part in values.split(_AT_ONCE):
            rounded = part.to(self._dtype)
            # The sum finds non-finite values fast, but may itself overflow.
            if not math.isfinite(float(rounded.sum())) and not bool(rounded.isfinite().all()):
                kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "fp32")
                rule = f"has values that {kind} cannot represent"
                raise CheckpointError(Problem(name, None, rule, "export it as bf16 or fp32"))
            if self._dtype != torch.float32:
                part.copy_(rounded)
            if self._progress is not None:
                self._progress.advance(4 * part.numel())


def unset_weights(model: ModelConfig) -> dict[str, Tensor]:
    """The model's weights by canonical name on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Decoder(model, seed=None).state_dict()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def write_shards(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write named tensors in `dtype`: model.safetensors, or numbered shards with their index.

    `shapes` lists the tensors that `tensors` will yield, in the same order.
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
    """The next `len(names)` tensors of the stream in `dtype`, in flat blocks."""
    for expected in names:
        name, tensor = next(stream)
        assert name == expected
        for part in tensor.detach().reshape(-1).split(_AT_ONCE):
            yield part.to(dtype)


def filled_decoder(model: ModelConfig, weights: StepWeights) -> Decoder:
    """The native model with these weights, in evaluation mode."""
    with torch.device("meta"):
        decoder = Decoder(model, seed=None)
    decoder = decoder.to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights[name])
    return decoder
