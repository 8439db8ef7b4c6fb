"""A token file as one stream, with exactly one end-of-sequence token after each document."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.manifest import manifest_for

_CHUNK = 1 << 20


class TokenStream:
    """All documents of a token file concatenated, each followed by one eos.

    Files of other frameworks may lack end-of-sequence tokens in some or all documents. Where a
    document does not end in `eos_id`, the stream inserts one; existing ones are not doubled. An
    empty document adds nothing.

    Attributes:
        num_tokens: tokens of the stream, inserted ones included.
        num_inserted: end tokens that the file does not have.
    """

    def __init__(self, file: TokenFile, eos_id: int | None) -> None:
        """Read a token file as one stream.

        Args:
            file: the token file.
            eos_id: the token that ends a document; None leaves the file's tokens as they are.
        """
        self.file = file
        self.eos_id = eos_id
        self.num_inserted = 0
        self._file_starts: NDArray[np.int64] | None = None
        if eos_id is not None and not _prepared_with(file, eos_id):
            self._find_missing_ends(eos_id)
        self.num_tokens = file.num_tokens + self.num_inserted

    def _find_missing_ends(self, eos_id: int) -> None:
        starts = self.file.document_starts
        missing = np.zeros(len(starts) - 1, bool)
        for first in range(0, len(missing), _CHUNK):
            ends = starts[first + 1 : first + 1 + _CHUNK]
            filled = ends > starts[first : first + len(ends)]
            missing[first : first + len(ends)][filled] = (
                self.file.tokens_at(ends[filled] - 1) != eos_id
            )
        self.num_inserted = int(missing.sum())
        if self.num_inserted:
            self._file_starts = starts
            self._stream_starts = starts + np.concatenate(([0], np.cumsum(missing)))

    def expect(self, start: int, stop: int) -> None:
        """Let the system fetch tokens [start, stop) of the stream: see `TokenFile.expect`."""
        if self._file_starts is not None:
            places = np.array([start, stop])
            documents = np.searchsorted(self._stream_starts, places, side="right") - 1
            # Inserted ends before a place lie in the stream only; its document's own comes last.
            shift = self._stream_starts[documents] - self._file_starts[documents]
            start, stop = (int(place) for place in places - shift)
        self.file.expect(start, min(stop, self.file.num_tokens))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """[stop - start] int64 tokens of the stream from `start` on."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        if self._file_starts is None:
            return self.file.read(start, stop).astype(np.int64)
        # A stream position belongs to an inserted eos where it is the last of its document and
        # the document is one token longer in the stream than in the file.
        first, last = np.searchsorted(self._stream_starts, [start, stop], side="right") - 1
        pieces = []
        for document in range(int(first), min(int(last) + 1, self.file.num_documents)):
            stream_start = int(self._stream_starts[document])
            begin = max(start, stream_start) - stream_start
            end = min(stop, int(self._stream_starts[document + 1])) - stream_start
            file_start = int(self._file_starts[document])
            length = int(self._file_starts[document + 1]) - file_start
            pieces.append(
                self.file.read(
                    file_start + min(begin, length), file_start + min(end, length)
                ).astype(np.int64)
            )
            if end > length:
                pieces.append(np.array([self.eos_id], np.int64))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _prepared_with(file: TokenFile, eos_id: int) -> bool:
    """Whether a manifest states that every document of the file ends in `eos_id`.

    Checking the file itself may read the whole .bin.
    """
    manifest = manifest_for(file.prefix)
    if manifest is None or manifest["tokenizer"]["eos_id"] != eos_id:
        return False
    entry = manifest["files"].get(f"{file.prefix.name}.bin")
    return entry is not None and entry["bytes"] == file.num_tokens * file.dtype.itemsize
