"""Reading the weights of a Hugging Face folder that is not trusted, one tensor at a time."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alibi_lm.utils.errors import CheckpointError, Problem

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Stored types that fp32 holds exactly, by their names in safetensors."""
_SHOWN = 4
_FIX = "restore the folder"


class SourceFolder:
    """The tensors of a Hugging Face folder. A context manager.

    Attributes:
        files: the weights files, in order.
        shapes: shape of each tensor by its name in the class.
        dtypes: stored type of each.

    Raises:
        CheckpointError: no weights, pickled ones that were not asked for, an index or a link
            that leads out of the folder, a file that cannot be read.
    """

    def __init__(self, folder: Path, prefix: str, *, allow_pickle: bool = False) -> None:
        """Open the folder.

        Args:
            folder: the folder.
            prefix: what the class's names begin with; a folder saved from the bare base model
                lacks it.
            allow_pickle: whether `pytorch_model.bin` files are read, by torch's loader for
                weights only, where there are no safetensors.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self._stack = ExitStack()
        self._readers: dict[str, tuple[Any, str]] = {}
        try:
            self.files, index = _weights_files(folder, allow_pickle)
            stored: dict[str, str] = {}
            for file in self.files:
                self._open(file, stored)
            _check_index(folder, index, stored)
            self._name(prefix)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SourceFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, file: str, stored: dict[str, str]) -> None:
        path = self.folder / file
        opened: Any = self._pickled(path) if file.endswith(".bin") else self._safetensors(path)
        for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
            if name in stored:
                rule = f"is in {stored[name]} and in {file}"
                raise CheckpointError(Problem(f"{self.folder}: {name}", None, rule, _FIX))
            stored[name] = file
            self._readers[name] = (opened, name)
            if isinstance(opened, dict):
                tensor = opened[name]
                self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
            else:
                part = opened.get_slice(name)
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = DTYPES.get(part.get_dtype())

    def _safetensors(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            detail = " ".join(str(error).split())
            rule = f"is damaged or no safetensors file ({detail})"
            raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None

    def _pickled(self, path: Path) -> dict[str, Tensor]:
        try:
            # Mapped: a tensor is in memory while it is used. Nothing but tensors is unpickled.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged, unsafe and old files raise errors of many kinds
            detail = " ".join(str(error).split())[:120]
            rule = f"is damaged, or holds more than tensors ({detail})"
            raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
        ):
            raise CheckpointError(Problem(str(path), None, "is no dict of tensors", _FIX))
        return loaded

    def _name(self, prefix: str) -> None:
        """Give the tensors of a bare base model the names that they have in the whole class."""
        if any(name.startswith(prefix) for name in self.shapes):
            return
        for table in (self.shapes, self.dtypes, self._readers):
            renamed = {prefix + name: value for name, value in table.items()}
            table.clear()
            cast("dict[str, Any]", table).update(renamed)

    def amiss(self, name: str, shape: Sequence[int]) -> str | None:
        """What is wrong with a tensor that should have this shape, or None."""
        if name not in self.shapes:
            return "is missing"
        if self.shapes[name] != tuple(shape):
            return f"has shape {list(self.shapes[name])}, not {list(shape)} as config.json says"
        return None

    def problems(self, expected: Mapping[str, Sequence[int]], tied: str | None) -> list[Problem]:
        """What is missing, of another shape or type, or beyond the `expected` tensors.

        `tied` is the name of a copy that a folder may hold of a tensor it does not need.
        """
        found = [
            (name, rule) for name, shape in expected.items() if (rule := self.amiss(name, shape))
        ]
        for name in self.shapes:
            if name not in expected and name != tied:
                found.append((name, "is no tensor of the class that config.json names"))
            elif self.dtypes[name] not in DTYPES.values():
                found.append((name, "is of a type that fp32 does not hold exactly"))
        if len(found) > _SHOWN:
            found[_SHOWN - 1 :] = [(f"and {len(found) - _SHOWN + 1} more tensors", "are wrong")]
        return [Problem(f"{self.folder}: {name}", None, rule, _FIX) for name, rule in found]

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self._read(name, None)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix as it is stored, up to its last.

        Raises:
            CheckpointError: they cannot be read.
        """
        return self._read(name, slice(start, stop))

    def _read(self, name: str, rows: slice | None) -> Tensor:
        opened, stored = self._readers[name]
        try:
            if isinstance(opened, dict):
                return cast(Tensor, opened[stored] if rows is None else opened[stored][rows])
            if rows is None:
                return cast(Tensor, opened.get_tensor(stored))
            last = min(rows.stop, self.shapes[name][0])
            return cast(Tensor, opened.get_slice(stored)[rows.start : last])
        except (OSError, SafetensorError, RuntimeError) as error:
            rule = f"cannot be read ({' '.join(str(error).split())})"
            raise CheckpointError(Problem(f"{self.folder}: {name}", None, rule, _FIX)) from None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder.

    Raises:
        CheckpointError: it is missing, leads out of the folder, or is none.
    """
    path = inside(folder, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        rule = f"cannot be read ({' '.join(str(error).split())[:120]})"
        raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None
    if not isinstance(value, dict):
        raise CheckpointError(Problem(str(path), None, "is no JSON object", _FIX))
    return value


def inside(folder: Path, name: str) -> Path:
    """The path of a plain file of the folder.

    The hub's cache links a file of `snapshots/REVISION/` to one of its own `blobs/`; no other
    link that leads out of the folder is followed.

    Raises:
        CheckpointError: the name is a path, or the file is missing, none, or elsewhere.
    """
    path = folder / name
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        rule = "is a path, where the name of a file in the folder is wanted"
        raise CheckpointError(Problem(f"{folder}: {name!r}", None, rule, _FIX))
    if not os.path.lexists(path):
        raise CheckpointError(Problem(str(path), None, "is missing", _FIX))
    if path.is_symlink():
        target, root = path.resolve(), folder.resolve()
        cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
        if target.parent not in (root, cache):
            rule = f"is a link out of the folder, to {target}"
            raise CheckpointError(Problem(str(path), None, rule, "put the file itself there"))
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(Problem(str(path), None, "is no file", _FIX))
    return path


def _weights_files(folder: Path, allow_pickle: bool) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weights files, and the tensor-to-file map of their index, if they have one."""
    for name in (SAFETENSORS, PICKLED) if allow_pickle else (SAFETENSORS,):
        index = f"{name}.index.json"
        if os.path.lexists(folder / name):
            inside(folder, name)
            return [name], None
        if os.path.lexists(folder / index):
            return _indexed(folder, index, Path(name).suffix)
    if any(_pickles(folder)):
        rule = "holds pickled weights only, which can run code when they are read"
        fix = "convert them to safetensors, or import them with --allow-pickle (tensors only)"
        raise CheckpointError(Problem(str(folder), None, rule, fix))
    rule = f"holds no {SAFETENSORS}, nor its index"
    raise CheckpointError(Problem(str(folder), None, rule, "name a Hugging Face folder"))


def _pickles(folder: Path) -> Iterator[Path]:
    for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl"):
        yield from folder.glob(pattern)


def _indexed(folder: Path, index: str, suffix: str) -> tuple[list[str], dict[str, str]]:
    weight_map = read_json(folder, index).get("weight_map")
    path = folder / index
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(Problem(str(path), None, "has no weight_map", _FIX))
    for name, file in weight_map.items():
        if not isinstance(file, str):
            rule = f"names no file for {name}"
            raise CheckpointError(Problem(str(path), None, rule, _FIX))
        if not file.endswith(suffix):
            rule = f"names {file!r} for {name}, which is no {suffix} file"
            raise CheckpointError(Problem(str(path), None, rule, _FIX))
    files = sorted(set(weight_map.values()))
    for file in files:
        inside(folder, file)
    return files, weight_map


def _check_index(folder: Path, index: dict[str, str] | None, stored: Mapping[str, str]) -> None:
    if index is None:
        return
    for name, file in index.items():
        if stored.get(name) != file:
            rule = f"is not in {file}, where the index has it"
            raise CheckpointError(Problem(f"{folder}: {name}", None, rule, _FIX))
    for name in stored.keys() - index.keys():
        rule = f"is in {stored[name]} and not in the index"
        raise CheckpointError(Problem(f"{folder}: {name}", None, rule, _FIX))
