"""The first pass over a recipe's sources, for what must be known before tokenizing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from alibi_lm.data.config import RecipeConfig, SourceConfig
from alibi_lm.data.preparation.documents import Document, DocumentReader
from alibi_lm.data.preparation.generated import sample_documents
from alibi_lm.data.preparation.sources import list_files
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.progress import Progress


@dataclass
class ScanResult:
    """Result of the first pass."""

    long_validation: set[str] = field(default_factory=set)
    """SHA-256 (hex) of the long documents kept for validation."""
    num_bytes: dict[str, int] = field(default_factory=dict)
    """UTF-8 bytes of the kept documents by source."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {"long_validation": sorted(self.long_validation), "num_bytes": self.num_bytes}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ScanResult:
        """The result of `to_json`."""
        return cls(set(content["long_validation"]), dict(content["num_bytes"]))


class TextSample:
    """At most `max_bytes` of documents: those with the lowest hash of (seed, text).

    The choice does not depend on the documents' order; memory use is that of the sample.
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self._max_bytes = max_bytes
        self._seed = str(seed).encode()
        self._heap: list[tuple[int, bytes, str, int]] = []
        self._held: set[bytes] = set()
        self._num_bytes = 0

    def offer(self, document: Document) -> None:
        """Add a document; drop those with the highest hashes if the sample is full."""
        rank = int.from_bytes(sha256(self._seed + document.digest).digest()[:8], "big")
        if document.digest in self._held:
            return  # a duplicate
        full = self._num_bytes + document.num_bytes > self._max_bytes
        if full and self._heap and rank > -self._heap[0][0]:
            return
        heapq.heappush(self._heap, (-rank, document.digest, document.text, document.num_bytes))
        self._held.add(document.digest)
        self._num_bytes += document.num_bytes
        while self._num_bytes > self._max_bytes and len(self._heap) > 1:
            _, digest, _, num_bytes = heapq.heappop(self._heap)
            self._held.remove(digest)
            self._num_bytes -= num_bytes

    def texts(self, without: set[str]) -> Iterator[str]:
        """The documents by increasing hash, except those whose digest is in `without`."""
        for _, digest, text, _ in sorted(self._heap, reverse=True):
            if digest.hex() not in without:
                yield text


def scan(recipe: RecipeConfig, sample: TextSample | None) -> ScanResult:
    """Read every source once: choose long validation documents and fill the tokenizer's sample.

    Raises:
        DataError: a source cannot be read, or has fewer long documents than it must keep.
    """
    scanned = ScanResult()
    problems = []
    for source in recipe.sources:
        if source.generated:
            if sample is not None:
                for document in sample_documents(source):
                    sample.offer(document)
            continue
        lowest: list[tuple[float, str]] = []
        total = _file_bytes(source)
        reader = DocumentReader(source)
        with Progress(f"reading {source.name}", total) as progress:
            scanned.num_bytes[source.name] = 0
            for document in reader:
                scanned.num_bytes[source.name] += document.num_bytes
                progress.advance(document.num_bytes)
                if source.min_long_validation and len(document.text) >= source.long_chars:
                    _keep_lowest(lowest, document, source.min_long_validation)
                if sample is not None and document.share >= source.validation_fraction:
                    sample.offer(document)
        if not reader.kept:
            rule = f"has no document left (left out: {dict(reader.skipped)})"
            fix = "check its path and its filters"
            problems.append(Problem(f"source {source.name}", None, rule, fix))
        elif len(lowest) < source.min_long_validation:
            problems.append(
                Problem(
                    f"source {source.name}: min_long_validation",
                    source.min_long_validation,
                    f"only {len(lowest)} documents have {source.long_chars:,} characters",
                    "lower it or long_chars, or add text",
                )
            )
        scanned.long_validation.update(digest for _, digest in lowest)
    if problems:
        raise DataError(*problems)
    return scanned


def _keep_lowest(lowest: list[tuple[float, str]], document: Document, count: int) -> None:
    entry = (-document.share, document.digest.hex())
    if entry in lowest:
        return
    if len(lowest) < count:
        heapq.heappush(lowest, entry)
    else:
        heapq.heappushpop(lowest, entry)


def _file_bytes(source: SourceConfig) -> int | None:
    """Approximate text bytes of a source with text files, else None."""
    if source.format not in ("text", "jsonl"):
        return None
    return sum(file.size for file in list_files(source))


def known_bytes(source: SourceConfig, scanned: ScanResult) -> int | None:
    """Text bytes of a source: exact after a scan, else an estimate or None."""
    return scanned.num_bytes.get(source.name) or _file_bytes(source)
