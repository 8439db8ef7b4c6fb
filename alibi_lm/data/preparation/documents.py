"""Read the documents of a source one at a time, through Hugging Face `datasets`.

Local files are streamed, so a corpus may be larger than memory. They go through
`IterableDataset.from_generator` instead of the builders of `datasets`, which change documents: its
"text" builder opens files with universal newlines (CRLF becomes LF), its "json" builder infers
types (a document "2024-01-01" becomes a timestamp), and its "parquet" builder takes every file's
schema from the first one. Here a document is what its file says, byte by byte. Hub datasets go
through `load_dataset`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, count, islice
from typing import Any

from alibi_lm.data.config import SourceConfig
from alibi_lm.data.preparation.files import (
    binary_kind,
    compression,
    decoded,
    lines,
    open_file,
    read_text,
)
from alibi_lm.data.preparation.sources import expand, list_files
from alibi_lm.utils.errors import DataError, Problem, UserError

NOT_UTF8, NOT_UTF8_FILE = "not_utf8", "not_utf8_file"
WHOLE_FILE = " (the whole file)"
"""Ends the origin of a binary file that is skipped where lines were expected."""
_MAX_NAMES = 100


@dataclass
class Document:
    """One kept document."""

    text: str
    origin: str
    """The file (and line) or dataset it comes from."""
    num_bytes: int
    """Length in UTF-8."""
    digest: bytes
    """SHA-256 of its UTF-8."""
    pieces: tuple[str, ...] | None = None
    """Parts of the text to encode separately; None encodes the whole text."""

    @property
    def share(self) -> float:
        """The hash as a number in [0, 1), compared with `validation_fraction`."""
        return int.from_bytes(self.digest[:7], "big") / 2**56


@dataclass
class DocumentReader:
    """Iterates over the kept documents of a source and counts the skipped ones.

    `position` counts the rows read so far, skipped ones included: a reader created from the
    `state` of another continues after its last row.
    """

    source: SourceConfig
    position: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped documents by reason: empty, too_short, too_long, no_text, not_utf8, and
    not_utf8_file for a binary file in place of lines."""
    skipped_names: list[str] = field(default_factory=list)
    """Origins of the first 100 that are not UTF-8."""
    generate: Callable[[int], tuple[str, ...]] | None = None
    """Generates the pieces of document i, for sources that are not read from files."""

    def state(self) -> dict[str, Any]:
        """The position and counts as JSON, for `from_state`."""
        return {
            "position": self.position,
            "kept": self.kept,
            "skipped": dict(sorted(self.skipped.items())),
            "skipped_names": list(self.skipped_names),
        }

    @classmethod
    def from_state(
        cls,
        source: SourceConfig,
        state: dict[str, Any],
        generate: Callable[[int], tuple[str, ...]] | None = None,
    ) -> DocumentReader:
        """A reader that continues from a `state`."""
        return cls(
            source,
            state["position"],
            state["kept"],
            Counter(state["skipped"]),
            list(state["skipped_names"]),
            generate,
        )

    def __iter__(self) -> Iterator[Document]:
        limit = self.source.max_documents
        if limit is not None and self.kept >= limit:
            return
        for text, origin, pieces in self._rows():
            self.position += 1
            document = self._keep(text, origin, pieces)
            if document is not None:
                self.kept += 1
                yield document
                if limit is not None and self.kept >= limit:
                    return

    def _rows(self) -> Iterator[tuple[str | bytes | None, str, tuple[str, ...] | None]]:
        """Text, origin and pieces of each row from `position` on."""
        if self.generate is None:
            for text, origin in _rows(self.source, self.position):
                yield text, origin, None
            return
        for index in count(self.position):
            pieces = self.generate(index)
            yield "".join(pieces), f"source {self.source.name}, document {index:,}", pieces

    def _keep(
        self, text: str | bytes | None, origin: str, pieces: tuple[str, ...] | None
    ) -> Document | None:
        reason = None
        encoded = b""
        if text is None:
            reason = "no_text"
        elif isinstance(text, bytes):
            reason = NOT_UTF8_FILE if origin.endswith(WHOLE_FILE) else NOT_UTF8
            if len(self.skipped_names) < _MAX_NAMES:
                self.skipped_names.append(origin)
        elif not text:
            reason = "empty"
        elif len(text) < self.source.min_chars:
            reason = "too_short"
        elif self.source.max_chars is not None and len(text) > self.source.max_chars:
            reason = "too_long"
        else:
            encoded = text.encode("utf-8")
            return Document(text, origin, len(encoded), sha256(encoded).digest(), pieces)
        self.skipped[reason] += 1
        return None


def _rows(source: SourceConfig, skip: int) -> Iterator[tuple[str | bytes | None, str]]:
    """Text and origin of each row from row `skip` on; bytes where it is not UTF-8."""
    try:
        if source.format == "hub":
            yield from _hub_rows(source, skip)
        else:
            yield from _file_rows(source, skip)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # datasets raises many kinds
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        name = ", ".join(source.paths)
        fix = f"check source {source.name}: its path, format and text_field"
        raise DataError(Problem(name, None, f"cannot be read ({detail})", fix)) from error


def _file_rows(source: SourceConfig, skip: int) -> Iterator[tuple[str | bytes | None, str]]:
    from datasets import IterableDataset

    paths = [file.path for file in list_files(source)]
    if source.format == "text":
        paths, skip = paths[skip:], 0
    if not paths:
        return
    arguments: dict[str, Any] = {"paths": tuple(paths), "text_field": source.text_field}
    if source.format in ("parquet", "arrow"):
        arguments |= {"format": source.format, "skip": skip}
        skip = 0
    rows = IterableDataset.from_generator(_GENERATORS[source.format], gen_kwargs=arguments)
    for row in islice(rows, skip, None):
        text, origin = row["text"], row["origin"]
        if isinstance(text, bytes) and source.not_utf8 == "refuse":
            kind = f" ({row['binary']})" if row.get("binary") else ""
            fix = "repair it, exclude it or set not_utf8: skip"
            raise DataError(Problem(origin, None, f"is not UTF-8{kind}", fix))
        yield text, f"{origin}{WHOLE_FILE}" if row.get("binary") else origin


def _text_rows(paths: tuple[str, ...], text_field: str) -> Iterator[dict[str, Any]]:
    """One row a file. Bytes instead of a string where the file is not text."""
    for path in paths:
        yield {"text": read_text(path), "origin": path}


def _jsonl_rows(paths: tuple[str, ...], text_field: str) -> Iterator[dict[str, Any]]:
    """One row a line that is not blank, or one an element of a file that is a JSON array.

    Bytes instead of a string where a line is not UTF-8; one such row for a whole binary file.
    """
    for path in paths:
        if kind := binary_kind(path):
            yield {"text": b"", "origin": path, "binary": kind}
            continue
        with open_file(path) as file:
            stream = lines(file, path)
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                if line.lstrip().startswith(b"["):
                    yield from _array_rows(path, number, line + b"".join(stream), text_field)
                    break
                yield from _line_rows(path, number, line, stream, text_field)


def _line_rows(
    path: str, number: int, line: bytes, rest: Iterator[bytes], text_field: str
) -> Iterator[dict[str, Any]]:
    """The rows of this line and those after it."""
    for at, raw in enumerate(chain([line], rest), start=number):
        if raw.strip():
            origin = f"{path}:{at}"
            text: str | bytes | None = decoded(raw)
            if isinstance(text, str):
                yield {
                    "text": _field_of(_parsed(text, origin), text_field, origin),
                    "origin": origin,
                }
            else:
                yield {"text": text, "origin": origin}


def _array_rows(
    path: str, number: int, content: bytes, text_field: str
) -> Iterator[dict[str, Any]]:
    text = decoded(content)
    if isinstance(text, bytes):
        yield {"text": text, "origin": path}
        return
    values = _parsed(text, f"{path}:{number}")
    for index, value in enumerate(values):
        origin = f"{path}, element {index:,}"
        yield {"text": _field_of(value, text_field, origin), "origin": origin}


def _parsed(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        fix = "repair or delete it"
        raise DataError(Problem(origin, None, f"is not JSON ({detail})", fix)) from None


def _field_of(value: Any, text_field: str, origin: str) -> str | bytes | None:
    """The text at a field such as `text` or `meta.text`; a key with dots comes first."""
    path = (
        [text_field] if isinstance(value, dict) and text_field in value else text_field.split(".")
    )
    for key in path:
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            keys = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            rule = f"has no field {text_field!r} (it has: {keys[:80]})"
            raise DataError(Problem(origin, None, rule, "set text_field"))
        value = value[key]
    return _checked(value, text_field, origin)


def _checked(text: Any, text_field: str, origin: str) -> str | bytes | None:
    if text is not None and not isinstance(text, str):
        rule = f"holds {type(text).__name__}, not text, in field {text_field!r}"
        raise DataError(Problem(origin, None, rule, "set text_field"))
    if text is not None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON can write as \ud800
            return text.encode("utf-8", "surrogatepass")
    return text


def _table_rows(
    paths: tuple[str, ...], text_field: str, format: str, skip: int
) -> Iterator[dict[str, Any]]:
    """One row a row of parquet or arrow files, each read with its own schema."""
    import pyarrow

    batches = _parquet_batches if format == "parquet" else _arrow_batches
    for path in paths:
        number = 0
        try:
            for batch in batches(path, text_field):
                first = min(skip, len(batch))
                skip -= first
                for value in batch.slice(first).to_pylist():
                    origin = f"{path}, row {number + first:,}"
                    yield {"text": _field_of(value, text_field, origin), "origin": origin}
                    number += 1
                number += first
        except (pyarrow.ArrowException, OSError) as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            rule = f"cannot be read as {format} from row {number:,} on ({detail})"
            raise DataError(Problem(path, None, rule, "restore or exclude the file")) from None


def _parquet_batches(path: str, text_field: str) -> Iterator[Any]:
    from pyarrow import parquet

    file = parquet.ParquetFile(_random_access(path))
    names = file.schema_arrow.names
    root = text_field if text_field in names else text_field.split(".")[0]
    if root not in names:
        rule = f"has no field {text_field!r} (it has: {', '.join(names)[:80]})"
        raise DataError(Problem(path, None, rule, "set text_field or exclude the file"))
    yield from file.iter_batches(columns=[root])


def _arrow_batches(path: str, text_field: str) -> Iterator[Any]:
    from pyarrow import ArrowInvalid, ipc

    try:
        yield from ipc.open_stream(_random_access(path))
    except ArrowInvalid:
        reader = ipc.open_file(_random_access(path))
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _random_access(path: str) -> Any:
    import pyarrow

    if compression(path) is None:
        return pyarrow.memory_map(path)
    with open_file(path) as file:
        return pyarrow.BufferReader(file.read())


def _hub_rows(source: SourceConfig, skip: int) -> Iterator[tuple[str | bytes | None, str]]:
    from datasets import load_dataset

    name = expand(source.paths[0])
    rows = load_dataset(name, source.subset, split=source.split, streaming=source.streaming)
    for number, row in enumerate(rows.skip(skip), start=skip):
        origin = f"{name}, row {number:,}"
        yield _field_of(row, source.text_field, origin), origin


_GENERATORS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "text": _text_rows,
    "jsonl": _jsonl_rows,
    "parquet": _table_rows,
    "arrow": _table_rows,
}
