"""Layout-free storage of a model's states: flat fragments of named tensors in safetensors files.

A checkpoint holds, for each parameter and each kind of state (`param`, `exp_avg`,
`exp_avg_sq`), one or more fragments: a run of elements of the flattened fp32 tensor, keyed
`NAME|KIND|START`. Which rank wrote a fragment does not matter to a reader, so a checkpoint can be
read back under any number of ranks and any ZeRO stage, and each reader touches only the bytes
that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from alibi_lm.errors import CheckpointError, Problem

PARAM = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (PARAM, *MOMENTS)


def fragment_key(name: str, kind: str, start: int) -> str:
    """The key under which a fragment is stored."""
    return f"{name}|{kind}|{start}"


@dataclass(frozen=True)
class _Piece:
    start: int
    numel: int
    file: Any
    key: str


class FragmentReader:
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
            for pieces in self._pieces.values():
                pieces.sort(key=lambda piece: piece.start)
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
            name, kind, start = key.rsplit("|", 2)
            numel = file.get_slice(key).get_shape()[0]
            self._pieces.setdefault((name, kind), []).append(_Piece(int(start), numel, file, key))

    def _check_cover(self) -> None:
        problems = []
        for name, shape in self.shapes.items():
            for kind in self.kinds:
                end = 0
                for piece in self._pieces.get((name, kind), ()):
                    if piece.start != end:
                        break
                    end += piece.numel
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
            low = max(start, piece.start)
            high = min(start + numel, piece.start + piece.numel)
            if low < high:
                stored = piece.file.get_slice(piece.key)[low - piece.start : high - piece.start]
                result[low - start : high - start] = stored
        return result

    def tensor(self, name: str, kind: str = PARAM) -> torch.Tensor:
        """A whole tensor, fp32, in its own shape."""
        shape = self.shapes[name]
        return self.read(name, kind, 0, math.prod(shape)).reshape(shape)

    def tensors(self, kind: str = PARAM) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's tensor of one kind, one at a time."""
        for name in self.shapes:
            yield name, self.tensor(name, kind)
