"""The files of a recipe's source, in order, and a fingerprint of them."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alibi_lm.config_loading import to_dict
from alibi_lm.data.config import GENERATED, SourceConfig
from alibi_lm.utils.errors import DataError, Problem

FOLDERS = {"${python:stdlib}": "stdlib", "${python:packages}": "purelib"}
"""Prefixes that a path may have, and the names of their folders in `sysconfig`."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    path: str
    """Its path."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of its last change, in nanoseconds."""


def expand(path: str) -> str:
    """A path of a recipe with `${python:stdlib}` or `${python:packages}` replaced.

    Raises:
        DataError: the path contains another ${...}.
    """
    for name, folder in FOLDERS.items():
        path = path.replace(name, sysconfig.get_paths()[folder])
    if left := re.search(r"\$\{[^}]*\}?", path):
        rule = f"contains the unknown variable {left[0]}"
        raise DataError(Problem("path", path, rule, f"use {' or '.join(FOLDERS)}"))
    return path


def list_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source: path by path, each folder or glob in sorted order, each file once.

    Raises:
        DataError: a path matches nothing, no file is left after `include` and `exclude`, or files
            cannot be read (all are listed).
    """
    found: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    for path in source.paths:
        any_file = False
        for name, relative in _candidates(expand(path), source.include):
            any_file = True
            if name in found or any(fnmatch.fnmatch(relative, p) for p in source.exclude):
                continue
            file = _inspect(name)
            if isinstance(file, Problem):
                problems.append(file)
            else:
                found[name] = file
        if not any_file:
            rule = f"does not exist or holds no file that matches include = {source.include}"
            fix = f"check the path of source {source.name}"
            problems.append(Problem(expand(path), None, rule, fix))
    if problems:
        raise DataError(*problems)
    if not found:
        rule = "has no file left after exclude"
        raise DataError(Problem(f"source {source.name}", None, rule, "exclude less"))
    return list(found.values())


def _candidates(path: str, include: str) -> Iterator[tuple[str, str]]:
    """Path, and path relative to the folder or glob, of each file that `path` names."""
    if os.path.isdir(path):
        for name in sorted(_walk(path, set())):
            if fnmatch.fnmatch(os.path.basename(name), include):
                yield name, Path(name).relative_to(path).as_posix()
    elif os.path.lexists(path):
        yield path, os.path.basename(path)
    else:
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
        root = os.path.dirname(fixed) or "."
        for name in sorted(glob.glob(path, recursive=True)):
            if not os.path.isdir(name):
                yield name, os.path.relpath(name, root).replace(os.sep, "/")


def _walk(folder: str, above: set[str]) -> Iterator[str]:
    """Files below a folder; linked folders are followed, except in cycles."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        rule = error.strerror or type(error).__name__
        raise DataError(Problem(folder, None, rule, "make the folder readable")) from None
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, above | {real})
        else:
            yield entry.path


def _inspect(path: str) -> SourceFile | Problem:
    try:
        status = os.stat(path)
    except OSError as error:
        rule = error.strerror or type(error).__name__
        return Problem(path, None, rule, "restore the file or exclude it")
    if not stat.S_ISREG(status.st_mode):
        return Problem(path, None, "is not a regular file", "exclude it")
    if not os.access(path, os.R_OK):
        return Problem(path, None, "is not readable", "make it readable or exclude it")
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def fingerprint(source: SourceConfig) -> str:
    """A digest that changes when a file of the source is added, removed or written.

    For a Hub dataset it covers the name only; for generated documents, the settings and the
    version of the generator.
    """
    state = hashlib.sha256()
    if source.generated:
        settings = getattr(source, source.format)
        state.update(repr((source.format, to_dict(settings), GENERATED[source.format])).encode())
    elif source.format == "hub":
        state.update(repr((source.paths, source.subset, source.split)).encode())
    else:
        for file in list_files(source):
            state.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\n".encode(errors="replace"))
    return state.hexdigest()
