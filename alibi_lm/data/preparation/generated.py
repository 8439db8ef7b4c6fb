"""Sources of synthetic documents: their generators, given the recipe's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from alibi_lm.data.config import ReasoningConfig, RecallConfig, RecipeConfig, SourceConfig
from alibi_lm.data.preparation.documents import Document, DocumentReader
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks import passkey
from alibi_lm.tasks.reasoning import ReasoningGenerator
from alibi_lm.tasks.recall_documents import Filler, RecallGenerator

SAMPLE_DOCUMENTS = 500
"""Most documents of a generated source that a new tokenizer is trained on."""
_SENTENCES = " ".join(passkey.FILLER) + "\n"
_BYTES_A_TOKEN = 4

Encode = Callable[[str], list[int]]
DocumentGenerator = Callable[[int], tuple[str, ...]]
"""Document number i as pieces of text: a pure function of the recipe and i."""


def document_generator(
    recipe: RecipeConfig, source: SourceConfig, tokenizer: Tokenizer, long_validation: set[str]
) -> DocumentGenerator | None:
    """The generator of a source's documents, or None if they are read from files.

    Raises:
        DataError: the settings are inconsistent, or the filler cannot be read.
    """
    if source.recall is not None:
        text = _filler(recipe, source.recall, long_validation)
        filler = Filler(text, tokenizer.encode, tokenizer.decode)
        return _recall(source.recall, filler, tokenizer.encode)
    if source.reasoning is not None:
        return _reasoning(source.reasoning, tokenizer.encode)
    return None


def sample_documents(source: SourceConfig) -> Iterator[Document]:
    """Documents like a source's, to train a tokenizer on.

    Without a tokenizer a byte counts as a token, so the documents have four times as many.
    """
    generate: DocumentGenerator
    if source.recall is not None:
        filler = Filler(100 * _SENTENCES, _bytes_of, _text_of)
        larger = replace(source.recall, max_tokens=_BYTES_A_TOKEN * source.recall.max_tokens)
        generate = _recall(larger, filler, _bytes_of)
    else:
        assert source.reasoning is not None
        tokens = _BYTES_A_TOKEN * source.reasoning.max_tokens
        generate = _reasoning(replace(source.reasoning, max_tokens=tokens), _bytes_of)
    yield from islice(DocumentReader(source, generate=generate), SAMPLE_DOCUMENTS)


def _recall(config: RecallConfig, filler: Filler, encode: Encode) -> DocumentGenerator:
    return RecallGenerator(
        config.kinds, config.max_tokens, config.dense, config.seed, filler, encode
    ).document


def _reasoning(config: ReasoningConfig, encode: Encode) -> DocumentGenerator:
    fewest, most = config.lengths
    return ReasoningGenerator(
        config.tasks, (fewest, most), config.max_tokens, config.seed, encode
    ).document


def _filler(recipe: RecipeConfig, config: RecallConfig, long_validation: set[str]) -> str:
    """Text of training documents of the named source, or the default sentences."""
    if config.filler is None:
        return 100 * _SENTENCES
    source = next(source for source in recipe.sources if source.name == config.filler)
    texts, left = [], config.filler_bytes
    for document in DocumentReader(source):
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
