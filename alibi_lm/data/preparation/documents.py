"""Read the documents of a source one at a time, through Hugging Face `datasets`.

Local files are streamed, so a corpus may be larger than memory. Text and jsonl files go through
`IterableDataset.from_generator` instead of the builders of `datasets`, which change documents: its
"text" builder opens files with universal newlines (CRLF becomes LF) and its "json" builder infers
types (a document "2024-01-01" becomes a timestamp) and falls back to pandas. Here a document is
what its file says, byte by byte. Parquet, arrow and hub datasets are typed and go through
`load_dataset`.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, islice
from typing import Any, BinaryIO, cast

from alibi_lm.data.config import SourceConfig
from alibi_lm.data.preparation.sources import expand, list_files
from alibi_lm.utils.errors import DataError, Problem, UserError

NOT_UTF8 = "not_utf8"
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
    """Skipped documents by reason: empty, too_short, too_long, no_text, not_utf8."""
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
            reason = NOT_UTF8
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
        if source.format in ("text", "jsonl"):
            yield from _exact_rows(source, skip)
        else:
            yield from _typed_rows(source, skip)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # datasets and pyarrow raise many kinds
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        name = ", ".join(source.paths)
        fix = f"check source {source.name}: its path, format and text_field"
        raise DataError(Problem(name, None, f"cannot be read ({detail})", fix)) from error


def _exact_rows(source: SourceConfig, skip: int) -> Iterator[tuple[str | bytes | None, str]]:
    from datasets import IterableDataset

    paths = [file.path for file in list_files(source)]
    if source.format == "text":
        generator, paths, skip = _text_rows, paths[skip:], 0
    else:
        generator = _jsonl_rows
    if not paths:
        return
    rows = IterableDataset.from_generator(
        generator, gen_kwargs={"paths": tuple(paths), "text_field": source.text_field}
    )
    for row in islice(rows, skip, None):
        text = row["text"]
        if isinstance(text, bytes) and source.not_utf8 == "refuse":
            raise DataError(
                Problem(
                    row["origin"], None, "is not UTF-8", "mend it, exclude it or set not_utf8: skip"
                )
            )
        yield text, row["origin"]


def _text_rows(paths: tuple[str, ...], text_field: str) -> Iterator[dict[str, Any]]:
    """One row a file. Bytes instead of a string where the file is not UTF-8."""
    for path in paths:
        with open(path, "rb") as file:
            yield {"text": _decode(file.read()), "origin": path}


def _jsonl_rows(paths: tuple[str, ...], text_field: str) -> Iterator[dict[str, Any]]:
    """One row a line that is not blank. Bytes instead of a string where it is not UTF-8."""
    for path in paths:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                origin = f"{path}:{number}"
                decoded = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                text = (
                    _field_of(decoded, text_field, origin) if isinstance(decoded, str) else decoded
                )
                yield {"text": text, "origin": origin}


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _decode(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _field_of(line: str, text_field: str, origin: str) -> str | bytes | None:
    try:
        value = json.loads(line)
    except ValueError as error:
        detail = " ".join(str(error).split())
        raise DataError(Problem(origin, None, f"is not JSON ({detail})", "mend it")) from None
    if not isinstance(value, dict) or text_field not in value:
        keys = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        rule = f"has no field {text_field!r} (it has: {keys[:80]})"
        raise DataError(Problem(origin, None, rule, "set text_field"))
    return _checked(value[text_field], text_field, origin)


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


def _typed_rows(source: SourceConfig, skip: int) -> Iterator[tuple[str | bytes | None, str]]:
    from datasets import load_dataset

    if source.format == "hub":
        name = expand(source.paths[0])
        rows = load_dataset(name, source.subset, split=source.split, streaming=source.streaming)
        origin = name
    else:
        # Names are given to `datasets` as patterns, so what is special in them is escaped.
        files = [glob.escape(file.path) for file in list_files(source)]
        options = {"columns": [source.text_field]} if source.format == "parquet" else {}
        rows = load_dataset(
            source.format, data_files=files, split="train", streaming=True, **options
        )
        origin = f"source {source.name}"
    if source.text_field not in (rows.column_names or [source.text_field]):
        rule = f"has no field {source.text_field!r} (it has: {', '.join(rows.column_names)})"
        raise DataError(Problem(origin, None, rule, "set text_field"))
    for number, row in enumerate(rows.skip(skip), start=skip):
        if source.text_field not in row:
            rule = f"has no field {source.text_field!r} (it has: {', '.join(row)})"
            raise DataError(Problem(origin, None, rule, "set text_field"))
        where = f"{origin}, row {number:,}"
        yield _checked(row[source.text_field], source.text_field, where), where
