"""One interface over sentencepiece models and `tokenizers` files.

A tokenizer trained here is lossless: decode(encode(text)) == text for every string, and no text
encodes to a control token (text that spells `</s>` or `<0x0A>` is text). Two characters need care:

- U+2581 is sentencepiece's own sign for a space, and it decodes it as one. Here it is encoded as
  its three UTF-8 byte pieces, which decode to U+2581. A Hugging Face tokenizer does the same
  without any normalizer where its vocabulary spells a space as a space: U+2581 is then a
  character without a piece, which byte fallback encodes as the same three bytes. A model without
  byte pieces cannot hold it, and encoding it is refused.
- A lone surrogate is half a character, has no UTF-8 form, and is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.files import replacing

T = TypeVar("T")

SPACE_SIGN = "\u2581"
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")
_MODEL_NAMES = ("tokenizer.model", "tokenizer.json")


class _Backend(Protocol):
    vocab_size: int
    unk_id: int | None
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> NDArray[np.integer]: ...

    def decode(self, ids: list[int]) -> str: ...


class _SentencePiece:
    def __init__(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor(model_proto=content)
        self.vocab_size = int(self._model.vocab_size())
        self.unk_id = _known(self._model.unk_id())
        self.bos_id = _known(self._model.bos_id())
        self.pad_id = _known(self._model.pad_id())
        self.eos_id = _known(self._model.eos_id())
        if self.eos_id is None:
            self.eos_id = self._find(EOS_NAMES)
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SIGN.encode()]
        self._space_sign_ids = byte_ids if all(map(self._model.is_byte, byte_ids)) else None

    def _find(self, names: Iterable[str]) -> int | None:
        unknown = self._model.unk_id()
        return next(
            (i for i in map(self._model.piece_to_id, names) if i not in (unknown, -1)), None
        )

    def encode(self, text: str) -> list[int]:
        if SPACE_SIGN not in text:
            return list(self._model.encode(text))
        if self._space_sign_ids is None:
            at = text.index(SPACE_SIGN)
            rule = (
                f"stands at character {at:,} of a document, and the tokenizer reads it as a space"
            )
            raise DataError(
                Problem("U+2581", None, rule, "take a model with byte fallback, or replace it")
            )
        first, *others = text.split(SPACE_SIGN)
        ids = list(self._model.encode(first))
        for part in others:
            ids += self._space_sign_ids
            ids += self._model.encode(part)
        return ids

    def encode_array(self, text: str) -> NDArray[np.integer]:
        if SPACE_SIGN in text:
            return np.array(self.encode(text), np.int32)
        return cast("NDArray[np.int32]", self._model.encode(text, out_type="numpy"))

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids))


class _TokenizersFile:
    def __init__(self, content: bytes) -> None:
        import tokenizers

        self._model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._model.no_truncation()
        self._model.no_padding()
        # Text that spells a special token is text.
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id = _first(vocabulary, EOS_NAMES)
        self.bos_id = _first(vocabulary, ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"))
        self.pad_id = _first(vocabulary, ("<pad>", "<|padding|>", "[PAD]"))
        self.unk_id = _first(vocabulary, ("<unk>", "[UNK]"))

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        return np.array(self.encode(text), np.int32)

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids, skip_special_tokens=False))


class Tokenizer:
    """Text to token ids and back. Instances can be pickled.

    Attributes:
        file: the file that defines it.
        kind: "sentencepiece" or "tokenizer.json".
        digest: SHA-256 of that file.
        vocab_size: one more than the largest id.
        eos_id: the token that ends a document.
        unk_id, bos_id, pad_id: control tokens; None where the tokenizer has none.
    """

    def __init__(self, file: Path) -> None:
        """Read a `.model` or a `tokenizer.json`.

        Raises:
            DataError: the file is missing, is no tokenizer, or has no end-of-sequence token.
        """
        self.file = Path(file)
        self._content = _read(self.file)
        self._load()

    def _load(self) -> None:
        self.kind: Literal["sentencepiece", "tokenizer.json"] = (
            "tokenizer.json" if self.file.suffix == ".json" else "sentencepiece"
        )
        self.digest = hashlib.sha256(self._content).hexdigest()
        make = _TokenizersFile if self.kind == "tokenizer.json" else _SentencePiece
        try:
            self._backend: _Backend = make(self._content)
        except Exception as error:  # both libraries raise bare exceptions of their own
            rule = f"is not a {self.kind} tokenizer ({' '.join(str(error).split())[:80]})"
            fix = "name a sentencepiece .model or a tokenizer.json"
            raise DataError(Problem(str(self.file), None, rule, fix)) from None
        self.vocab_size: int = self._backend.vocab_size
        self.unk_id, self.bos_id = self._backend.unk_id, self._backend.bos_id
        self.pad_id = self._backend.pad_id
        if self._backend.eos_id is None:
            rule = f"has no end-of-sequence token (none of {', '.join(EOS_NAMES)})"
            fix = "take a tokenizer that has one"
            raise DataError(Problem(str(self.file), None, rule, fix))
        self.eos_id: int = self._backend.eos_id

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "content": self._content}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.file, self._content = state["file"], state["content"]
        self._load()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos or eos.

        Raises:
            DataError: the text holds a lone surrogate, or U+2581 that the tokenizer cannot hold.
        """
        return self._checked(self._backend.encode, text)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """`encode` as an array, without a Python number a token."""
        return self._checked(self._backend.encode_array, text)

    def _checked(self, encode: Callable[[str], T], text: str) -> T:
        try:
            return encode(text)
        except (RuntimeError, TypeError):  # what the two libraries make of a lone surrogate
            found = re.search("[\ud800-\udfff]", text)
            if found is None:
                raise
        rule = f"stands at character {found.start():,} of a document: half a character"
        name = f"U+{ord(found[0]):04X}"
        raise DataError(Problem(name, None, rule, "mend or drop the document"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, without bos or eos."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens of a sentencepiece model have none."""
        return self._backend.decode([int(token) for token in ids])

    def save(self, folder: str | Path) -> Path:
        """Write the defining file into a folder under its usual name, and return its path."""
        name = "tokenizer.json" if self.kind == "tokenizer.json" else "tokenizer.model"
        path = Path(folder) / name
        with replacing(path) as temporary:
            temporary.write_bytes(self._content)
        return path


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer folder, a sentencepiece .model or a tokenizer.json.

    Raises:
        DataError: nothing usable is there.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in _MODEL_NAMES if (path / name).is_file()]
        if not found:
            fix = "name a folder that holds tokenizer.model or tokenizer.json"
            raise DataError(Problem(str(path), None, "holds no tokenizer", fix))
        path = found[0]
    return Tokenizer(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(Problem(str(path), None, "no such file", "check the path")) from None
    except OSError as error:
        rule = error.strerror or type(error).__name__
        raise DataError(Problem(str(path), None, rule, "check the file")) from None


def _known(token: int) -> int | None:
    return None if token < 0 else int(token)


def _first(vocabulary: dict[str, int], names: Iterable[str]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)
