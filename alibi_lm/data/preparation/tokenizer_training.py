"""Train a lossless sentencepiece tokenizer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from alibi_lm.data.config import TokenizerConfig
from alibi_lm.data.tokenizer import SPACE_SIGN, Tokenizer
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.files import replacing

_SENTENCE_CHARS = 4000
_NUM_THREADS = 4
"""Fixed, because the number of threads changes the partial sums of unigram training."""


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, path: Path) -> Tokenizer:
    """Train a tokenizer on documents and write it to `path`; same texts, same bytes.

    No normalization, no dummy prefix, all whitespace kept, byte fallback, single digits. Ids:
    unk 0, eos 1, bos 2, pad 3.

    Raises:
        ConfigError: vocab_size does not fit the texts.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            eos_id=1,
            bos_id=2,
            pad_id=3,
            max_sentence_length=8 * _SENTENCE_CHARS,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(_vocabulary_problem(config.vocab_size, str(error))) from None
    trained = model.getvalue()
    if config.kind == "unigram":
        trained = round_scores(trained)
    with replacing(path) as temporary:
        temporary.write_bytes(trained)
    return Tokenizer(path)


def round_scores(model: bytes) -> bytes:
    """A sentencepiece model with its normal pieces' scores at multiples of 1/64.

    Unigram sums scores along a text, in fp32 in sentencepiece and in fp64 in `tokenizers`. Rounding
    would decide between segmentations that tie (of a long run of spaces, say), differently in the
    two; sums of multiples of 1/64 are exact in both.
    """
    # The generated protobuf module has no type annotations.
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    for piece in proto.pieces:
        if piece.type == proto.SentencePiece.NORMAL:
            piece.score = round(piece.score * 64) / 64
    return bytes(proto.SerializeToString())


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Documents in chunks that end after a line where possible.

    NUL and U+2581 are removed: sentencepiece drops sentences with NUL, and U+2581 must not be in
    a piece (see `data.tokenizer`). Both are encoded as bytes.
    """
    for text in texts:
        text = text.replace(SPACE_SIGN, "").replace("\0", "")
        start = 0
        while start < len(text):
            stop = start + _SENTENCE_CHARS
            if stop < len(text):
                stop = text.rfind("\n", start, stop) + 1 or stop
            yield text[start:stop]
            start = stop


def _vocabulary_problem(vocab_size: int, message: str) -> Problem:
    """An error of sentencepiece as a problem of our key."""
    key = "tokenizer.vocab_size"
    if limit := re.search(r"too high .*?<= (\d+)", message):
        return Problem(
            key,
            vocab_size,
            f"is too large for the documents (at most {int(limit[1]):,})",
            "lower it or add text",
        )
    if re.search(r"smaller than required_chars", message) or "meta_pieces" in message:
        numbers = re.search(r"(\d+) vs (\d+)", message)
        need = f" ({numbers[2]} needed)" if numbers else ""
        return Problem(
            key,
            vocab_size,
            f"is too small for the documents' characters{need}",
            "raise it or lower tokenizer.character_coverage",
        )
    detail = " ".join(message.split())[:160]
    return Problem("tokenizer", None, f"cannot be trained ({detail})", "add text")
