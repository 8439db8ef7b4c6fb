"""Atomic file writes: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed over `path`.

    On an error the temporary file is removed and `path` keeps its old content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Atomically replace `path` by `text` in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Atomically replace `path` by `value` as indented JSON; NaN and infinity are refused."""
    write_text(path, json_text(value))


def stored_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or something else in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def json_text(value: Any) -> str:
    """A value as indented JSON; NaN and infinity are refused."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def sync(path: Path) -> None:
    """Flush a file or folder to the storage device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file, read in pieces; `advance` is called with the size of each."""
    if advance is None:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


def sha256_of_text(text: str) -> str:
    """Hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()
