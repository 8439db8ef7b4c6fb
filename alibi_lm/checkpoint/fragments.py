"""Layout-free storage of a model's states: flat fragments of named tensors in safetensors files.

A checkpoint holds, for each parameter and each kind of state (`param`, `exp_avg`,
`exp_avg_sq`), one or more fragments of the flattened whole fp32 tensor. Which rank wrote a
fragment does not matter to a reader, so a checkpoint can be read back under any number of ranks,
any ZeRO stage and any split of the tensors, and each reader touches only the bytes that it needs.

A fragment's key says which elements it holds:

- `NAME|KIND|START`: consecutive elements from START.
- `NAME|KIND|START:LENGTH:STRIDE` (since format 2): LENGTH elements at START, START + STRIDE, and so
  on; the last stretch may be shorter. A rank that holds some columns of a tensor writes it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from alibi_lm.parallel.shard import StridedReader, StridedSlice
from alibi_lm.utils.errors import CheckpointError, Problem

PARAM = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (PARAM, *MOMENTS)


def fragment_key(name: str, kind: str, where: int | StridedSlice) -> str:
    """The key under which a fragment is stored: its first element, or its runs."""
    if isinstance(where, StridedSlice):
        if not where.is_contiguous:
            return f"{name}|{kind}|{where.start}:{where.length}:{where.stride}"
        where = where.start
    return f"{name}|{kind}|{where}"


@dataclass(frozen=True)
class _Piece:
    strided: StridedSlice
    file: Any
    key: str

    def copy_into(self, result: torch.Tensor, start: int) -> None:
        """Copy what lies in elements [start, start + numel) of the tensor into `result`, those."""
        strided, stop = self.strided, start + result.numel()
        # The runs that overlap: from the first that ends after `start` to those before `stop`.
        first = max(0, -(-(start - strided.start - strided.length + 1) // strided.stride))
        last = min(
            -(-strided.numel // strided.length), -(-(stop - strided.start) // strided.stride)
        )
        if first >= last:
            return
        low = first * strided.length
        stored = self.file.get_slice(self.key)[low : min(strided.numel, last * strided.length)]
        while first < last:
            place = strided.start + first * strided.stride
            count = min(strided.length, stored.numel())
            skipped = max(0, start - place)
            whole = min(stored.numel() // strided.length, (stop - place) // strided.stride)
            if skipped == 0 and whole > 1:
                shape, strides = (whole, strided.length), (strided.stride, 1)
                target = result.as_strided(shape, strides, place - start)
                target.copy_(stored[: whole * strided.length].view(shape))
                first, stored = first + whole, stored[whole * strided.length :]
                continue
            kept = min(count, stop - place)
            if skipped < kept:
                result[place + skipped - start : place + kept - start] = stored[skipped:kept]
            first, stored = first + 1, stored[count:]


class FragmentReader(StridedReader):
    """Reads slices of named flat tensors from a checkpoint's shard files. A context manager.

    Raises:
        CheckpointError: a shard is not a safetensors file, or the fragments of a tensor do not
            cover it exactly once.
    """

    def __init__(self, step_folder: Path, meta: Mapping[str, Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape) for name, shape in meta["parameters"].items()
        }
        self._folder = step_folder
        self._stack = ExitStack()
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        try:
            for file_name in meta["shards"]:
                self._open(step_folder / file_name)
            self._check_cover()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            rule = f"cannot be read ({error})"
            raise CheckpointError(
                Problem(str(path), None, rule, "restore it, or use an earlier step")
            ) from None
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            name, kind, place = key.rsplit("|", 2)
            numel = file.get_slice(key).get_shape()[0]
            start, *rest = map(int, place.split(":"))
            length, stride = rest or (numel, numel)
            strided = StridedSlice(start, numel, length, stride)
            self._pieces.setdefault((name, kind), []).append(_Piece(strided, file, key))

    def _check_cover(self) -> None:
        problems = []
        for name, shape in self.shapes.items():
            for kind in self.kinds:
                end = _covered([piece.strided for piece in self._pieces.get((name, kind), ())])
                if end != math.prod(shape):
                    rule = f"{kind} has elements up to {end} of {math.prod(shape)}"
                    problems.append(Problem(name, None, rule, "use another checkpoint"))
        if problems:
            raise CheckpointError(*problems)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that this checkpoint holds."""
        stored = {kind for _, kind in self._pieces}
        return tuple(kind for kind in KINDS if kind in stored or kind == PARAM)

    def read(self, name: str, kind: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a flattened tensor, fp32 `[numel]`."""
        result = torch.empty(numel, dtype=torch.float32)
        for piece in self._pieces[name, kind]:
            piece.copy_into(result, start)
        return result

    def tensor(self, name: str, kind: str = PARAM) -> torch.Tensor:
        """A whole tensor, fp32, in its own shape."""
        shape = self.shapes[name]
        return self.read(name, kind, 0, math.prod(shape)).reshape(shape)

    def tensors(self, kind: str = PARAM) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's tensor of one kind, one at a time."""
        for name in self.shapes:
            yield name, self.tensor(name, kind)


def _covered(slices: Sequence[StridedSlice]) -> int:
    """Up to which element the slices cover a tensor from its start, each element exactly once."""
    if all(strided.is_contiguous for strided in slices):
        starts = np.array([strided.start for strided in slices], dtype=np.int64)
        lengths = np.array([strided.numel for strided in slices], dtype=np.int64)
    else:
        counts = [np.arange(-(-strided.numel // strided.length)) for strided in slices]
        starts = np.concatenate(
            [
                strided.start + strided.stride * count
                for strided, count in zip(slices, counts, strict=True)
            ]
        )
        lengths = np.concatenate(
            [
                np.minimum(strided.length, strided.numel - strided.length * count)
                for strided, count in zip(slices, counts, strict=True)
            ]
        )
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.cumsum(lengths[order])
    expected = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    wrong = np.flatnonzero(starts != expected)
    if len(wrong):
        return int(expected[wrong[0]])
    return int(ends[-1]) if len(ends) else 0
