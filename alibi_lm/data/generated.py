"""Sources whose documents are made and not read: what makes them, given the recipe's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from alibi_lm.data.config import RecallConfig, RecipeConfig, SourceConfig
from alibi_lm.data.corpora import Document, Reader
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks import passkey
from alibi_lm.tasks.recall import Filler, RecallMaker

SAMPLE_DOCUMENTS = 500
"""Documents of a source that a new tokenizer is trained on at most."""
_SENTENCES = " ".join(passkey.FILLER) + "\n"
_BYTES_A_TOKEN = 4

Maker = Callable[[int], tuple[str, ...]]
"""Document number i as pieces of text: a pure function of the recipe and i."""


def maker(
    recipe: RecipeConfig, source: SourceConfig, tokenizer: Tokenizer, long_validation: set[str]
) -> Maker | None:
    """What makes the documents of a source, or None where they are read.

    Raises:
        DataError: its settings do not fit together, or its filler cannot be read.
    """
    if source.recall is None:
        return None
    text = _filler(recipe, source.recall, long_validation)
    filler = Filler(text, tokenizer.encode, tokenizer.decode)
    return _recall(source.recall, filler, tokenizer.encode).document


def sample_documents(source: SourceConfig) -> Iterator[Document]:
    """Documents like those of a source, for a tokenizer that is yet to be trained on them.

    A byte counts as a token, so documents are made that many times larger.
    """
    assert source.recall is not None
    config = replace(source.recall, max_tokens=_BYTES_A_TOKEN * source.recall.max_tokens)
    filler = Filler(100 * _SENTENCES, _bytes_of, _text_of)
    make = _recall(config, filler, _bytes_of).document
    yield from islice(Reader(source, make=make), SAMPLE_DOCUMENTS)


def _recall(
    config: RecallConfig, filler: Filler, encode: Callable[[str], list[int]]
) -> RecallMaker:
    return RecallMaker(config.kinds, config.max_tokens, config.dense, config.seed, filler, encode)


def _filler(recipe: RecipeConfig, config: RecallConfig, long_validation: set[str]) -> str:
    """Text of training documents of the named source, or the default sentences."""
    if config.filler is None:
        return 100 * _SENTENCES
    source = next(source for source in recipe.sources if source.name == config.filler)
    texts, left = [], config.filler_bytes
    for document in Reader(source):
        is_validation = document.share < source.validation_fraction
        if is_validation or document.digest.hex() in long_validation:
            continue
        texts.append(document.text)
        left -= document.num_bytes
        if left <= 0:
            break
    return "\n".join(texts)


def _bytes_of(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def _text_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="ignore")
