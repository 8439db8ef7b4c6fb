r"""Megatron-LM's indexed token files: a `.bin` of tokens and an `.idx` of document boundaries.

Layout of the `.idx` (little endian), after `megatron/core/datasets/indexed_dataset.py`:

    9 bytes   magic "MMIDIDX\0\0"
    uint64    version, always 1
    uint8     code of the token type (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16)
    uint64    number of sequences S
    uint64    number of document ends D + 1 (the list starts with a 0)
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in the .bin
    int64[D + 1]  index of each document's first sequence; the last entry is S
    int8[S]   modes, in multimodal files only

The `.bin` holds the tokens of all sequences one after another. A document is one or more
consecutive sequences. GPT-NeoX and Megatron-DeepSpeed write the same layout. An index that is
`[0]`, or that lacks its last entry, is read as one document per sequence, with a warning.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.files import sync
from alibi_lm.utils.logging import console

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = (6, 7)
_DIGEST_BLOCKS, _DIGEST_BYTES = 256, 4096
_MAX_SEQUENCE = 2**31 - 1
_CHUNK = 1 << 22
"""Index entries processed at a time, to bound memory."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token dtype for a vocabulary, by Megatron's rule: uint16 below 65,500, else int32."""
    return _DTYPES[8] if vocab_size < 65500 else _DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    """Path of the tokens of `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Path of the index of `prefix`."""
    return Path(f"{prefix}.idx")


class TokenFile:
    """A token file pair, memory-mapped and read only.

    Attributes:
        prefix: path without the .bin and .idx endings.
        dtype: type of a stored token.
        num_sequences, num_documents, num_tokens: counts.

    Raises:
        DataError: a file is missing, is not of this format, is cut short, holds floats, or the
            two files do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._open()
        if self._completed_index:
            rule = "its document index is incomplete; reading one document per sequence"
            console.warning(f"{idx_path(self.prefix)}: {rule}")

    def _open(self) -> None:
        index = idx_path(self.prefix)
        self.dtype, self.num_sequences, num_ends = _read_header(index)
        raw = np.memmap(index, mode="r")
        at = _HEADER.size
        self._lengths: NDArray[np.int32] = _section(raw, at, self.num_sequences, "<i4")
        at += self._lengths.nbytes
        self._pointers: NDArray[np.int64] = _section(raw, at, self.num_sequences, "<i8")
        at += self._pointers.nbytes
        self._document_index: NDArray[np.int64] = _section(raw, at, num_ends, "<i8")
        self._completed_index = self._lacks_documents()
        if self._completed_index:
            self._document_index = np.arange(self.num_sequences + 1, dtype=np.int64)
        self.num_documents = len(self._document_index) - 1
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self._check_index(index)
        self._check_tokens(bin_path(self.prefix))
        if self.num_tokens:
            with bin_path(self.prefix).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._tokens: NDArray[Any] = np.frombuffer(self._map, self.dtype)
        else:  # an empty file cannot be mapped
            self._tokens = np.empty(0, self.dtype)

    def _lacks_documents(self) -> bool:
        """Whether the document index is `[0]` (an old merge tool's) or lacks only its last entry.

        A shorter index is completed only where each of its documents is one sequence.
        """
        ends, count = self._document_index, self.num_sequences
        if not count or len(ends) not in (1, count):
            return False
        return bool(np.array_equal(ends, np.arange(len(ends))))

    def _check_index(self, path: Path) -> None:
        fix = "write the file again"
        ends = self._document_index
        if ends[0] != 0 or ends[-1] != self.num_sequences or np.any(ends[1:] < ends[:-1]):
            rule = f"its documents do not cover its {self.num_sequences:,} sequences in order"
            raise DataError(Problem(str(path), None, rule, fix))
        start = 0
        for first in range(0, self.num_sequences, _CHUNK):
            lengths = self._lengths[first : first + _CHUNK].astype(np.int64)
            if np.any(lengths < 0):
                raise DataError(Problem(str(path), None, "has a negative sequence length", fix))
            ends_at = start + np.cumsum(lengths) * self.dtype.itemsize
            pointers = self._pointers[first : first + _CHUNK]
            if pointers[0] != start or not np.array_equal(pointers[1:], ends_at[:-1]):
                rule = "its byte offsets are not the running sum of its sequence lengths"
                raise DataError(Problem(str(path), None, rule, fix))
            start = int(ends_at[-1])

    def _check_tokens(self, path: Path) -> None:
        expected = self.num_tokens * self.dtype.itemsize
        try:
            found = path.stat().st_size
        except OSError as error:
            fix = "copy the .bin beside its .idx"
            raise DataError(Problem(str(path), None, _reason(error), fix)) from None
        if found < expected:
            rule = f"is cut short: {expected:,} bytes expected, {found:,} bytes found"
            raise DataError(Problem(str(path), None, rule, "copy or prepare it again"))
        if found > expected:
            rule = f"does not match its index: {expected:,} bytes expected, {found:,} bytes found"
            raise DataError(Problem(str(path), None, rule, "use the matching .bin and .idx"))

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix = state["prefix"]
        self._open()

    @property
    def digest(self) -> str:
        """Fingerprint: SHA-256 of the index, the size of the .bin, and samples of it.

        The samples are 256 blocks of 4 KiB, evenly spaced: all of a file of up to 1 MiB.
        """
        with idx_path(self.prefix).open("rb") as file:
            state = hashlib.file_digest(file, "sha256")
        size = self.num_tokens * self.dtype.itemsize
        state.update(str(size).encode())
        with bin_path(self.prefix).open("rb") as file:
            for block in range(_DIGEST_BLOCKS):
                file.seek(block * max(size - _DIGEST_BYTES, 0) // (_DIGEST_BLOCKS - 1))
                state.update(file.read(_DIGEST_BYTES))
        return state.hexdigest()

    def _sequence_starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token offset at which each sequence starts; sequence S starts at the end."""
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        inside = sequences < self.num_sequences
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """[num_documents + 1] token offset of each document, and the end of the last one."""
        return self._sequence_starts(np.asarray(self._document_index))

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """[num_documents] tokens of each document."""
        return np.diff(self.document_starts)

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of one document, in the stored type (a read-only view of the file)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        start, stop = self._sequence_starts(np.asarray(self._document_index[index : index + 2]))
        return self._tokens[start:stop]

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop) of all documents concatenated (a read-only view)."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        return self._tokens[start:stop]

    def expect(self, start: int, stop: int) -> None:
        """Let the system fetch tokens [start, stop) from storage while others are read.

        Reading them one after another waits for the storage device each time, and for what it
        reads ahead.
        """
        first = start * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        length = stop * self.dtype.itemsize - first
        if stop > start and hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED, first, length)

    def tokens_at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """The token at each of the given positions."""
        return np.asarray(self._tokens[positions])


def _section(raw: NDArray[Any], start: int, count: int, dtype: str) -> NDArray[Any]:
    item = np.dtype(dtype).itemsize
    return np.ndarray(count, dtype, buffer=raw[start : start + count * item].data)


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return error.strerror or type(error).__name__


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Token type, number of sequences and number of document ends of an index."""
    fix = "name a pair written by alibi-lm prepare, GPT-NeoX or Megatron-LM"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        named = path.with_suffix("")
        fix = "check the prefix"
        if named.suffix in (".bin", ".idx"):
            fix = f"a prefix has no ending: give {named.with_suffix('')}"
        raise DataError(Problem(str(path), None, _reason(error), fix)) from None
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        rule = "is not a memory-mapped Megatron index (MMIDIDX)"
        raise DataError(Problem(str(path), None, rule, fix))
    if len(head) < _HEADER.size:
        rule = f"is cut short: {_HEADER.size} bytes of header expected, {len(head)} bytes found"
        raise DataError(Problem(str(path), None, rule, "copy or prepare it again"))
    _, version, code, num_sequences, num_ends = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(Problem(str(path), version, "is not version 1 of the index format", fix))
    if code not in _DTYPES:
        what = "floats, not tokens" if code in _FLOAT_CODES else "an unknown type"
        raise DataError(Problem(str(path), None, f"holds {what} (type code {code})", fix))
    expected = _HEADER.size + 12 * num_sequences + 8 * num_ends
    if size < expected or num_ends < 1:
        rule = f"is cut short: {expected:,} bytes expected, {size:,} bytes found"
        raise DataError(Problem(str(path), None, rule, "copy or prepare it again"))
    return _DTYPES[code], num_sequences, num_ends


class TokenFileWriter:
    """Writes a token file pair, each document one sequence, as Megatron's preprocessing does.

    Tokens go to `.PREFIX.bin.partial` and lengths to `.PREFIX.lengths.partial`; `finish` renames
    the .bin and then the .idx, so that an .idx never exists beside half a .bin. `flush` syncs both
    files and returns their state; a writer created from that state truncates the files to it and
    continues.
    """

    def __init__(
        self, prefix: str | Path, dtype: DTypeLike, state: dict[str, int] | None = None
    ) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in _DTYPES.items() if known == self.dtype)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin_partial, self._lengths_partial = partial_paths(self.prefix)
        state = state or {"documents": 0, "tokens": 0}
        self.num_documents, self.num_tokens = state["documents"], state["tokens"]
        if self.num_tokens and not self._bin_partial.exists() and bin_path(self.prefix).exists():
            # A `finish` of this state was killed between its two renames.
            os.replace(bin_path(self.prefix), self._bin_partial)
        self._bin = _open_at(self._bin_partial, self.num_tokens * self.dtype.itemsize)
        self._lengths = _open_at(self._lengths_partial, self.num_documents * 4)

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append documents: their tokens one after another, and the length of each."""
        if tokens.dtype != self.dtype:
            raise TypeError(f"tokens are {tokens.dtype}, the file holds {self.dtype}")
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError("lengths do not add up to the number of tokens")
        _write(self._bin, tokens.tobytes())
        _write(self._lengths, lengths.astype("<i4", copy=False).tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def add_document(self, tokens: Sequence[int]) -> None:
        """Append one document."""
        if len(tokens) > _MAX_SEQUENCE:
            raise ValueError(f"a document of {len(tokens):,} tokens does not fit an int32 length")
        self.add(np.array(tokens, self.dtype), np.array([len(tokens)], np.int32))

    def flush(self) -> dict[str, int]:
        """Sync all that was added, and return the state to resume from."""
        for file in (self._bin, self._lengths):
            os.fsync(file.fileno())
        return {"documents": self.num_documents, "tokens": self.num_tokens}

    def close(self) -> None:
        """Close the files and leave them partial."""
        self._bin.close()
        self._lengths.close()

    def finish(self) -> TokenFile:
        """Write the index, rename both files, and open the pair."""
        self.flush()
        self.close()
        index = idx_path(self.prefix)
        index_partial = index.with_name(f".{index.name}.partial")
        with index_partial.open("wb") as file:
            self._write_index(file)
        sync(index_partial)
        index.unlink(missing_ok=True)
        os.replace(self._bin_partial, bin_path(self.prefix))
        sync(index.parent)
        os.replace(index_partial, index)
        sync(index.parent)
        self._lengths_partial.unlink()
        return TokenFile(self.prefix)

    def _write_index(self, file: BinaryIO) -> None:
        count = self.num_documents
        file.write(_HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
        for lengths in self._stored_lengths():
            file.write(lengths.tobytes())
        start = 0
        for lengths in self._stored_lengths():
            ends = start + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            file.write(np.concatenate(([start], ends[:-1])).astype("<i8").tobytes())
            start = int(ends[-1])
        for first in range(0, count + 1, _CHUNK):
            file.write(np.arange(first, min(first + _CHUNK, count + 1), dtype="<i8").tobytes())

    def _stored_lengths(self) -> Iterator[NDArray[np.int32]]:
        with self._lengths_partial.open("rb") as file:
            while raw := file.read(4 * _CHUNK):
                yield np.frombuffer(raw, "<i4")


def partial_paths(prefix: Path) -> tuple[Path, Path]:
    """Paths of a writer's tokens and lengths before `finish`."""
    return (
        prefix.with_name(f".{prefix.name}.bin.partial"),
        prefix.with_name(f".{prefix.name}.lengths.partial"),
    )


def _write(file: io.FileIO, content: bytes) -> None:
    """Write all of `content`, unbuffered, so that a full disk raises here and not at close."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _open_at(path: Path, size: int) -> io.FileIO:
    """Truncate a file to `size` bytes and open it for appending."""
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        rule = f"is cut short: {size:,} bytes expected, {found:,} bytes found"
        raise DataError(Problem(str(path), None, rule, "prepare again with --overwrite"))
    file = io.FileIO(path, "ab")
    file.truncate(size)
    return file
