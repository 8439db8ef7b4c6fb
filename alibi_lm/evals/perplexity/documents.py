"""The documents that perplexity is measured on, and the bytes that their targets spell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import DataError, Problem


@dataclass(frozen=True)
class Documents:
    """The documents that are scored."""

    tokens: list[np.ndarray]
    """Token ids of each document, `[N]`, N above the longest length."""
    num_long: list[int]
    """How many long enough documents each corpus has, before max_tokens."""

    @property
    def num_targets(self) -> np.ndarray:
        """`[documents]`: targets of each document."""
        return np.array([len(document) - 1 for document in self.tokens])


def choose_documents(files: Sequence[TokenFile], longest: int, max_tokens: int | None) -> Documents:
    """Every document of more than `longest` tokens; with `max_tokens`, a fixed random part.

    Documents are added whole until `max_tokens` targets are reached.

    Raises:
        DataError: no document is long enough.
    """
    places = [
        (file, int(index))
        for file in files
        for index in np.flatnonzero(np.asarray(file.document_lengths) > longest)
    ]
    if not places:
        _raise_too_short(files, longest)
    num_long = [sum(1 for owner, _ in places if owner is file) for file in files]
    if max_tokens is not None:
        places = [places[i] for i in np.random.default_rng(0).permutation(len(places))]
    chosen: list[np.ndarray] = []
    total = 0
    for file, index in places:
        if max_tokens is not None and total >= max_tokens:
            break
        chosen.append(file.document(index))
        total += len(chosen[-1]) - 1
    return Documents(chosen, num_long)


def _raise_too_short(files: Sequence[TokenFile], longest: int) -> None:
    have = max((int(max(file.document_lengths, default=0)) for file in files), default=0)
    names = ", ".join(str(file.prefix) for file in files)
    rule = (
        f"no document has more than {longest:,} tokens, the longest length; "
        f"the longest document has {have:,}"
    )
    fix = f"give lengths below {have:,}, or a corpus with longer documents"
    raise DataError(Problem(names, None, rule, fix))


def target_bytes(documents: Sequence[np.ndarray], tokenizer: Tokenizer | None) -> np.ndarray | None:
    """UTF-8 bytes of the text that each document's targets spell, `[documents]`.

    That is the document's text less the text of token 0, which is not scored. End-of-document
    tokens spell nothing. None without a tokenizer.
    """
    if tokenizer is None:
        return None
    sizes = []
    for document in documents:
        ids = [int(token) for token in document if token != tokenizer.eos_id]
        size = len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())
        sizes.append(max(0, size))
    return np.array(sizes)


def tail_bytes(
    documents: Sequence[np.ndarray], tokenizer: Tokenizer | None, num_targets: int
) -> np.ndarray | None:
    """`target_bytes` of the last `num_targets` tokens of each document, `[documents]`."""
    whole = target_bytes(documents, tokenizer)
    before = target_bytes([document[:-num_targets] for document in documents], tokenizer)
    return None if whole is None or before is None else np.maximum(whole - before, 0)
