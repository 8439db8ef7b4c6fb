"""Reads the weights of an untrusted Hugging Face folder, one tensor at a time."""

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
"""Stored dtypes that fp32 represents exactly, by their names in safetensors."""
_SHOWN = 4
_FIX = "restore the folder"


class WeightsReader:
    """The tensors of a Hugging Face folder. A context manager.

    Attributes:
        files: the weights files, in order.
        shapes: shape of each tensor by its name in the `transformers` class.
        dtypes: stored dtype of each.

    Raises:
        CheckpointError: the folder has no weights, or only pickled ones without `allow_pickle`;
            an index or link points outside the folder; a file cannot be read.
    """

    def __init__(self, folder: Path, prefix: str, *, allow_pickle: bool = False) -> None:
        """Open the folder.

        Args:
            folder: the folder.
            prefix: prefix of the tensor names; a folder saved from the base model lacks it.
            allow_pickle: read `pytorch_model.bin` files (`weights_only=True`) where there are
                no safetensors files.
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

    def __enter__(self) -> WeightsReader:
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
            rule = f"is damaged or not a safetensors file ({detail})"
            raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None

    def _pickled(self, path: Path) -> dict[str, Tensor]:
        try:
            # mmap loads a tensor when it is used; weights_only unpickles nothing but tensors.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged, unsafe and old files raise errors of many kinds
            detail = " ".join(str(error).split())[:120]
            rule = f"is damaged, or holds more than tensors ({detail})"
            raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
        ):
            raise CheckpointError(Problem(str(path), None, "is not a dict of tensors", _FIX))
        return loaded

    def _name(self, prefix: str) -> None:
        """Add the prefix to the tensor names of a folder saved from the base model."""
        if any(name.startswith(prefix) for name in self.shapes):
            return
        for table in (self.shapes, self.dtypes, self._readers):
            renamed = {prefix + name: value for name, value in table.items()}
            table.clear()
            cast("dict[str, Any]", table).update(renamed)

    def shape_error(self, name: str, shape: Sequence[int]) -> str | None:
        """Why a tensor does not have this shape, or None if it does."""
        if name not in self.shapes:
            return "is missing"
        if self.shapes[name] != tuple(shape):
            return f"has shape {list(self.shapes[name])}, not {list(shape)} as config.json says"
        return None

    def problems(self, expected: Mapping[str, Sequence[int]], tied: str | None) -> list[Problem]:
        """Tensors that are missing, unexpected, or have the wrong shape or an unsupported dtype.

        `tied` names a tied output layer, which the folder may store or leave out.
        """
        errors = [
            (name, rule)
            for name, shape in expected.items()
            if (rule := self.shape_error(name, shape))
        ]
        for name in self.shapes:
            if name not in expected and name != tied:
                errors.append((name, "is not a tensor of the class that config.json names"))
            elif self.dtypes[name] not in DTYPES.values():
                errors.append((name, "has a dtype that fp32 cannot represent exactly"))
        if len(errors) > _SHOWN:
            errors[_SHOWN - 1 :] = [(f"and {len(errors) - _SHOWN + 1} more tensors", "are wrong")]
        return [Problem(f"{self.folder}: {name}", None, rule, _FIX) for name, rule in errors]

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self._read(name, None)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, min(stop, height)) of a matrix as it is stored.

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
    """Read a JSON object from the folder.

    Raises:
        CheckpointError: the file is missing, outside the folder, or not a JSON object.
    """
    path = plain_file(folder, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        rule = f"cannot be read ({' '.join(str(error).split())[:120]})"
        raise CheckpointError(Problem(str(path), None, rule, _FIX)) from None
    if not isinstance(value, dict):
        raise CheckpointError(Problem(str(path), None, "is not a JSON object", _FIX))
    return value


def plain_file(folder: Path, name: str) -> Path:
    """The path of a regular file in the folder.

    Files in the Hub cache's `snapshots/REVISION/` may be links into its `blobs/`; any other link
    out of the folder is refused.

    Raises:
        CheckpointError: `name` is a path, or the file is missing, not regular, or outside.
    """
    path = folder / name
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        rule = "is a path; expected the name of a file in the folder"
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
        raise CheckpointError(Problem(str(path), None, "is not a regular file", _FIX))
    return path


def _weights_files(folder: Path, allow_pickle: bool) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weights files, and the tensor-to-file map of their index, if any."""
    for name in (SAFETENSORS, PICKLED) if allow_pickle else (SAFETENSORS,):
        index = f"{name}.index.json"
        if os.path.lexists(folder / name):
            plain_file(folder, name)
            return [name], None
        if os.path.lexists(folder / index):
            return _indexed(folder, index, Path(name).suffix)
    if any(_pickles(folder)):
        rule = "holds only pickled weights, which can run code when loaded"
        fix = "convert them to safetensors, or import with --allow-pickle (loads tensors only)"
        raise CheckpointError(Problem(str(folder), None, rule, fix))
    rule = f"holds neither {SAFETENSORS} nor its index"
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
            rule = f"names {file!r} for {name}, which is not a {suffix} file"
            raise CheckpointError(Problem(str(path), None, rule, _FIX))
    files = sorted(set(weight_map.values()))
    for file in files:
        plain_file(folder, file)
    return files, weight_map


def _check_index(folder: Path, index: dict[str, str] | None, stored: Mapping[str, str]) -> None:
    if index is None:
        return
    for name, file in index.items():
        if stored.get(name) != file:
            rule = f"is not in {file}, where the index places it"
            raise CheckpointError(Problem(f"{folder}: {name}", None, rule, _FIX))
    for name in stored.keys() - index.keys():
        rule = f"is in {stored[name]} and not in the index"
        raise CheckpointError(Problem(f"{folder}: {name}", None, rule, _FIX))
