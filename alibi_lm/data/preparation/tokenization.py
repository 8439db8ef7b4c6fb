"""Tokenize one source of a recipe; an interrupted run resumes where it stopped.

Tokens are appended to partial files. Every few seconds the files are synced and a progress record
is replaced. A restart truncates the partial files to the record and continues; the order of
documents is fixed, so the result has the same bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alibi_lm.data.indexed import TokenFile, TokenFileWriter, idx_path
from alibi_lm.data.preparation.documents import Document, DocumentReader
from alibi_lm.data.preparation.workers import Encoded, Text, Workers
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.files import replacing, write_json
from alibi_lm.utils.progress import Progress

TRAIN, VALIDATION = "train", "validation"
BATCH_BYTES = 256 * 1024
"""Text in a worker's batch."""


@dataclass
class _Batch:
    """The documents of a batch, without their texts."""

    documents: list[tuple[str, str, int, int]]
    """Split, origin, characters and bytes of each document."""
    reader: dict[str, Any]
    """State of the reader after the batch."""
    num_bytes: int


class SourceTokenizer:
    """Tokenizes one source into FOLDER/NAME_train and FOLDER/NAME_validation."""

    def __init__(
        self, folder: Path, reader: DocumentReader, long_validation: set[str], record_seconds: float
    ) -> None:
        """Start writing one source's token files.

        Args:
            folder: where the files are written.
            reader: the source, at its start.
            long_validation: SHA-256 (hex) of long documents that go to validation.
            record_seconds: interval of progress records.
        """
        self.name = reader.source.name
        self._source = reader.source
        self._long_validation = long_validation
        self._record_seconds = record_seconds
        self._record_path = folder / f"{self.name}.progress.json"
        self.prefixes = {split: folder / f"{self.name}_{split}" for split in (TRAIN, VALIDATION)}
        self.bytes_path = folder / f"{self.name}_{VALIDATION}.bytes.npy"
        self._bytes_partial = folder / f".{self.name}_{VALIDATION}.bytes.partial"
        self._reader = reader
        self._record: dict[str, Any] = {
            "reader": reader.state(),
            "done": False,
            "lossy": 0,
            "splits": {
                split: {"chars": 0, "bytes": 0, "writer": {"documents": 0, "tokens": 0}}
                for split in self.prefixes
            },
        }
        if self._record_path.exists():
            self._record = json.loads(self._record_path.read_text(encoding="utf-8"))
            self._reader = DocumentReader.from_state(
                self._source, self._record["reader"], reader.generate
            )

    @property
    def resumed(self) -> bool:
        """Whether an earlier process tokenized part of it."""
        return self._reader.position > 0

    @property
    def bytes_done(self) -> int:
        """UTF-8 bytes of the documents tokenized so far."""
        return sum(split["bytes"] for split in self._record["splits"].values())

    def run(self, workers: Workers, progress: Progress) -> dict[str, Any]:
        """Tokenize the remaining documents and finish the files.

        Returns:
            counts by split, skipped documents by reason, and origins of those not in UTF-8.

        Raises:
            DataError: a document cannot be read or encoded, or no document is left to train on.
        """
        if not self._record["done"]:
            self._tokenize(workers, progress)
        result: dict[str, Any] = {}
        for split, prefix in self.prefixes.items():
            counts = self._record["splits"][split]
            file = self._finish(prefix, workers, counts["writer"])
            result[split] = {
                "documents": file.num_documents,
                "chars": counts["chars"],
                "bytes": counts["bytes"],
                "tokens": file.num_tokens,
                "dtype": str(file.dtype),
                "longest_document_tokens": int(file.document_lengths.max(initial=0)),
            }
        self._finish_bytes()
        if not result[TRAIN]["documents"]:
            rule = f"has no document left to train on (left out: {dict(self._reader.skipped)})"
            fix = "check its path and its filters"
            raise DataError(Problem(f"source {self.name}", None, rule, fix))
        state = self._reader.state()
        return result | {
            "skipped": state["skipped"],
            "not_utf8_names": state["skipped_names"],
            "lossy_documents": self._record["lossy"],
        }

    def _finish(self, prefix: Path, workers: Workers, state: dict[str, int]) -> TokenFile:
        if idx_path(prefix).exists():  # the .idx is renamed last
            return TokenFile(prefix)
        return TokenFileWriter(prefix, workers.dtype, state).finish()

    def _finish_bytes(self) -> None:
        """Write the UTF-8 bytes of each validation document, for losses per byte."""
        counts = np.fromfile(self._bytes_partial, "<i8")
        with replacing(self.bytes_path) as temporary, temporary.open("wb") as file:
            np.save(file, counts)

    def _tokenize(self, workers: Workers, progress: Progress) -> None:
        self._writers = {
            split: TokenFileWriter(prefix, workers.dtype, self._record["splits"][split]["writer"])
            for split, prefix in self.prefixes.items()
        }
        documents = self._record["splits"][VALIDATION]["writer"]["documents"]
        with self._bytes_partial.open("ab", buffering=0) as self._bytes_file:
            self._bytes_file.truncate(8 * documents)
            try:
                saved = time.monotonic()
                for batch, encoded in workers.map(self._batches()):
                    self._add(batch, encoded)
                    progress.advance(batch.num_bytes)
                    if time.monotonic() - saved >= self._record_seconds:
                        self._save()
                        saved = time.monotonic()
                self._record["reader"] = self._reader.state()
                self._record["done"] = True
                self._save()
            finally:
                for writer in self._writers.values():
                    writer.close()

    def _batches(self) -> Iterator[tuple[_Batch, list[Text]]]:
        texts: list[Text] = []
        documents: list[tuple[str, str, int, int]] = []
        size = 0
        for document in self._reader:
            texts.append(document.text if document.pieces is None else document.pieces)
            documents.append(
                (self._split(document), document.origin, len(document.text), document.num_bytes)
            )
            size += document.num_bytes
            if size >= BATCH_BYTES:
                yield _Batch(documents, self._reader.state(), size), texts
                texts, documents, size = [], [], 0
        if texts:
            yield _Batch(documents, self._reader.state(), size), texts

    def _split(self, document: Document) -> str:
        if document.share < self._source.validation_fraction:
            return VALIDATION
        return VALIDATION if document.digest.hex() in self._long_validation else TRAIN

    def _add(self, batch: _Batch, encoded: Encoded) -> None:
        if encoded.failed is not None:
            number, problem = encoded.failed
            origin = batch.documents[number][1]
            key = f"{origin}: {problem.key}"
            raise DataError(Problem(key, problem.value, problem.rule, problem.fix))
        ends = np.cumsum(encoded.lengths, dtype=np.int64)
        is_validation = np.array([document[0] == VALIDATION for document in batch.documents])
        of_validation = np.repeat(is_validation, encoded.lengths)
        if len(of_validation) != (ends[-1] if len(ends) else 0):
            raise ValueError("a worker returned lengths that do not match the batch")
        for split, chosen, tokens in (
            (TRAIN, ~is_validation, ~of_validation),
            (VALIDATION, is_validation, of_validation),
        ):
            self._writers[split].add(encoded.tokens[tokens], encoded.lengths[chosen])
        for split, _, num_chars, num_bytes in batch.documents:
            self._record["splits"][split]["chars"] += num_chars
            self._record["splits"][split]["bytes"] += num_bytes
        sizes = [document[3] for document in batch.documents if document[0] == VALIDATION]
        self._bytes_file.write(np.array(sizes, "<i8").tobytes())
        self._record["lossy"] += encoded.num_lossy
        self._record["reader"] = batch.reader

    def _save(self) -> None:
        for split, writer in self._writers.items():
            self._record["splits"][split]["writer"] = writer.flush()
        os.fsync(self._bytes_file.fileno())
        write_json(self._record_path, self._record)
