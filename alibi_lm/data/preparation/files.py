"""Read files of a corpus: compression by magic number, UTF-16 by its byte-order mark."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from alibi_lm.utils.errors import DataError, Problem

_MAGIC = (
    (b"\x1f\x8b", "gz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bz2"),
)
_BZ2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
"""What follows BZh and a digit: a text may begin with BZh as well."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OTHERS = {b"PK\x03\x04": "a zip archive", b"\x04\x22\x4d\x18": "lz4", b"7z\xbc\xaf": "7z",
           b"PAR1": "parquet", b"ARROW1": "arrow"}  # fmt: skip
_HEAD = 8192
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Raised by files that cannot be read or decompressed."""


def compression(path: str) -> str | None:
    """The compression of a file by its first bytes: gz, zst, xz, bz2 or None."""
    with open(path, "rb") as file:
        head = file.read(10)
    for magic, name in _MAGIC:
        if head.startswith(magic) and (name != "bz2" or head[4:] in _BZ2_BLOCKS):
            return name
    return None


@contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file.

    Raises:
        DataError: while it is open, the file cannot be read or decompressed.
    """
    try:
        with _decompressed(path, compression(path)) as stream:
            yield stream
    except READ_ERRORS as error:
        raise _unreadable(path, path, error) from None


def _unreadable(path: str, place: str, error: Exception) -> DataError:
    kind = compression(path)
    detail = " ".join(str(error).split()) or type(error).__name__
    rule = f"cannot be read as {kind} ({detail})" if kind else f"cannot be read ({detail})"
    return DataError(Problem(place, None, rule, "restore or exclude the file"))


def _decompressed(path: str, kind: str | None) -> BinaryIO:
    if kind == "gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if kind == "bz2":
        return cast(BinaryIO, bz2.open(path, "rb"))
    if kind == "xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if kind == "zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(path, "zstd"))
    return open(path, "rb")


def read_text(path: str) -> str | bytes:
    """The text of a file, or its bytes if they are not text."""
    with open_file(path) as file:
        raw = file.read()
    encoding = next((name for mark, name in _MARKS if raw.startswith(mark)), "utf-8")
    return decoded(raw, encoding)


def decoded(raw: bytes, encoding: str = "utf-8") -> str | bytes:
    """The bytes as text, or as they are where they are not in that encoding."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError:
        return raw


def lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The lines of an open file in UTF-8, without a byte-order mark.

    Raises:
        DataError: the file is damaged; the error names the line.
    """
    buffered = io.BufferedReader(cast(io.RawIOBase, file))
    head = buffered.peek(4)
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    number = 0
    try:
        if encoding is None:
            for line in buffered:
                yield line if number else line.removeprefix(codecs.BOM_UTF8)
                number += 1
            return
        wrapper = io.TextIOWrapper(buffered, encoding=encoding, newline="\n")
        for text in wrapper:
            yield text.encode("utf-8", "surrogatepass")
            number += 1
    except READ_ERRORS as error:
        raise _unreadable(path, f"{path}:{number + 1}", error) from None
    except UnicodeDecodeError as error:
        rule = f"is not {encoding} as its byte-order mark says ({error.reason})"
        place = f"{path}:{number + 1}"
        raise DataError(Problem(place, None, rule, "restore or exclude the file")) from None


def binary_kind(path: str) -> str | None:
    """What a file that is no text seems to be, or None for text."""
    try:
        with _decompressed(path, compression(path)) as file:
            head = file.read(_HEAD)
    except READ_ERRORS:
        return None  # whoever reads its lines names the place
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            return name
    if any(head.startswith(mark) for mark, _ in _MARKS):
        return None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "binary data" if b"\0" in head else None
    return None
