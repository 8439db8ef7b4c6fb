"""Text files as token files, made on the fly with a model's own tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from alibi_lm.data.config import SourceConfig
from alibi_lm.data.indexed import TokenFileWriter, idx_path, token_dtype
from alibi_lm.data.preparation.documents import DocumentReader
from alibi_lm.data.preparation.sources import fingerprint
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.parallel.errors import run_on_rank0
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.locking import exclusive_lock
from alibi_lm.utils.logging import console

Format = Literal["text", "jsonl", "parquet", "arrow"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def tokenized(paths: Sequence[str], tokenizer: Tokenizer | None, name: str, folder: Path) -> Path:
    """The prefix of the token files of some text, made by rank 0 where they are not there yet.

    Each document ends with the tokenizer's end token; no other special token is put in.

    Args:
        paths: files, globs or folders; the ending says how a file holds documents.
        tokenizer: the model's; None where it has none.
        name: the model's name, for messages.
        folder: where the token files are kept.

    Raises:
        DataError: there is no tokenizer, or a path names nothing that can be read.
    """
    if tokenizer is None:
        rule = f"{name} has no tokenizer"
        fix = "give corpus=PREFIX, token files made with the tokenizer that it was trained with"
        raise DataError(Problem("text", ", ".join(paths), rule, fix))
    return run_on_rank0(lambda: _tokenized(paths, tokenizer, folder))


def _tokenized(paths: Sequence[str], tokenizer: Tokenizer, folder: Path) -> Path:
    sources = _sources(paths)
    key = hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.digest}".encode())
    for source in sources:
        key.update(fingerprint(source).encode())
    prefix = folder / key.hexdigest()[:16]
    with exclusive_lock(folder, DataError):
        if not idx_path(prefix).exists():
            _write(sources, paths, tokenizer, prefix)
    return prefix


def _write(
    sources: Sequence[SourceConfig], paths: Sequence[str], tokenizer: Tokenizer, prefix: Path
) -> None:
    writer = TokenFileWriter(prefix, token_dtype(tokenizer.vocab_size))
    for source in sources:
        for document in DocumentReader(source):
            writer.add_document([*tokenizer.encode(document.text), tokenizer.eos_id])
    if not writer.num_documents:
        writer.close()
        rule, fix = "holds no document", "name files with text in them"
        raise DataError(Problem("text", ", ".join(paths), rule, fix))
    file = writer.finish()
    console.info(f"text: {file.num_documents:,} documents, {file.num_tokens:,} tokens")


def _sources(paths: Sequence[str]) -> list[SourceConfig]:
    """One source a path, in the format that its ending tells."""
    return [
        SourceConfig(name="text", path=path, format=FORMATS.get(Path(path).suffix, "text"))
        for path in paths
    ]
