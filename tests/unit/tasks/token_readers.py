"""Tokenizers whose pieces are known, and a corpus of lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alibi_lm.data.indexed import TokenFile, TokenFileWriter


class PieceTokenizer:
    """Pieces by a pattern; ids are given at first sight. Counts the characters it is given."""

    eos_id = 1
    stop_ids = (1,)

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._pieces = ["<unk>", "</s>"]
        self._ids: dict[str, int] = {}
        self.num_characters = 0

    @property
    def vocab_size(self) -> int:
        """Pieces so far."""
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        self.num_characters += len(text)
        return [self._id(piece) for piece in self._pattern.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; control tokens have none."""
        return "".join(self._pieces[i] for i in ids if i > 1)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


PATTERNS = {
    "words": r"\n| ?[A-Za-z]+| ?[0-9]|(?s:.)",
    "three digits at a time": r"\n+| ?[A-Za-z]{1,3}|[0-9]{1,3}|(?s:.)",
}


def lines_of(num_lines: int, seed: int = 0) -> str:
    """Lines of words and short numbers."""
    generator = np.random.default_rng(seed)
    words = ["value", "for", "in", "self", "return", "index", "of", "result", "list", "name"]
    lines = []
    for _ in range(num_lines):
        chosen = generator.integers(0, len(words), int(generator.integers(1, 12)))
        number = int(generator.integers(0, 500))
        lines.append(" ".join(words[i] for i in chosen) + f" {number}")
    return "\n".join(lines) + "\n"


def corpus_of(folder: Path, tokenizer: Any, num_lines: int) -> TokenFile:
    """A token file of one document of lines."""
    writer = TokenFileWriter(folder / "corpus", np.uint16)
    writer.add_document(tokenizer.encode(lines_of(num_lines)))
    return writer.finish()
