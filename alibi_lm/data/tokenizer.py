"""One interface over sentencepiece models and `tokenizers` files.

A tokenizer trained here is lossless: decode(encode(text)) == text for every string, and no text
encodes to a control token (text that spells `</s>` or `<0x0A>` is text). Two characters are
special:

- sentencepiece uses U+2581 for a space and decodes it as one. It is encoded here as its three
  UTF-8 byte pieces, which decode to U+2581. A Hugging Face tokenizer whose vocabulary spells a
  space as a space does the same without a normalizer: U+2581 has no piece, and byte fallback
  gives the same three bytes. A model without byte pieces cannot encode it, and it is refused.
- A lone surrogate has no UTF-8 form and is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from alibi_lm.data.special_tokens import (
    GENERATION,
    ROLES,
    USUAL_NAMES,
    read_special_tokens,
    write_special_tokens,
)
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.files import replacing
from alibi_lm.utils.logging import console

T = TypeVar("T")

SPACE_SIGN = "\u2581"
_MODEL_NAMES = ("tokenizer.model", "tokenizer.json")


class _Codec(Protocol):
    """What `Tokenizer` needs of a library to encode and decode."""

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> NDArray[np.integer]: ...

    def decode(self, ids: list[int]) -> str: ...


class _SentencePiece:
    randomness: str | None = None
    """Random sampling that the file asks for and that is switched off."""

    def __init__(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor(model_proto=content)
        self.vocab_size = int(self._model.vocab_size())
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SIGN.encode()]
        self._space_sign_ids = byte_ids if all(map(self._model.is_byte, byte_ids)) else None

    def default_id(self, role: str) -> int | None:
        token_id = int(getattr(self._model, f"{role}_id")())
        return None if token_id < 0 else token_id

    def id_of(self, token: str) -> int | None:
        token_id = int(self._model.piece_to_id(token))
        return token_id if token_id >= 0 and self.token_of(token_id) == token else None

    def token_of(self, token_id: int) -> str:
        return str(self._model.id_to_piece(token_id))

    def declare_special(self, token: str) -> None:
        """A sentencepiece model fixes the types of its pieces."""

    def is_special(self, token: str) -> bool:
        token_id = self._model.piece_to_id(token)
        return bool(self._model.is_control(token_id) or self._model.is_unknown(token_id))

    def encode(self, text: str) -> list[int]:
        if SPACE_SIGN not in text:
            return list(self._model.encode(text))
        if self._space_sign_ids is None:
            at = text.index(SPACE_SIGN)
            rule = f"is at character {at:,} of a document, and the tokenizer reads it as a space"
            raise DataError(
                Problem(
                    "U+2581", None, rule, "use a model with byte fallback, or replace the character"
                )
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
        self.randomness = switch_off_sampling(self._model.model)
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        decoder = self._model.get_added_tokens_decoder()
        self._special = {token.content for token in decoder.values() if token.special}

    def default_id(self, role: str) -> int | None:
        return None

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._model.token_to_id(token)
        return token_id

    def token_of(self, token_id: int) -> str:
        return str(self._model.id_to_token(token_id))

    def declare_special(self, token: str) -> None:
        from tokenizers import AddedToken

        self._model.add_special_tokens([AddedToken(token, normalized=False)])

    def is_special(self, token: str) -> bool:
        """Flagged so in the file, or declared and not produced by text that spells it."""
        return token in self._special or self.id_of(token) not in self.encode(token)

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        return np.array(self.encode(text), np.int32)

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids, skip_special_tokens=False))


def switch_off_sampling(model: Any) -> str | None:
    """Switch off the sampling of a `tokenizers` model, and say what it was."""
    for name, kind in (("dropout", "BPE dropout"), ("alpha", "unigram sampling, alpha =")):
        value = getattr(model, name, None)
        if value:
            setattr(model, name, None)
            return f"{kind} {value:g}"
    return None


def _usual_ids(backend: _SentencePiece | _TokenizersFile) -> dict[str, int | None]:
    """Special token ids by role that the file alone gives."""
    found: dict[str, int | None] = {}
    for role in ROLES:
        found[role] = backend.default_id(role)
        for name in USUAL_NAMES[role]:
            token_id = backend.id_of(name)
            if found[role] is None and token_id is not None and backend.is_special(name):
                found[role] = token_id
    return found


class Tokenizer:
    """Text to token ids and back. Instances can be pickled.

    Attributes:
        file: the file that defines it.
        kind: "sentencepiece" or "tokenizer.json".
        digest: SHA-256 of that file, and of special tokens that only the files beside it declare.
        vocab_size: one more than the largest id.
        eos_id: the token that ends a document.
        stop_ids: all tokens that end a generated text, eos_id first.
        unk_id, bos_id, pad_id: special tokens; None where the tokenizer has none.
    """

    def __init__(self, file: Path, eos: str | None = None) -> None:
        """Read a `.model` or a `tokenizer.json`, and the special tokens declared beside it.

        Ids depend on the text alone: truncation, padding, post-processors and sampling (BPE
        dropout) that the file asks for are switched off.

        Args:
            file: the tokenizer. tokenizer_config.json, special_tokens_map.json and
                generation_config.json in its folder declare special tokens; usual names count
                only where they declare none.
            eos: the end-of-sequence token, in place of a declared one.

        Raises:
            DataError: the file is missing, is not a tokenizer, or has no end-of-sequence token
                that is special.
        """
        self.file = Path(file)
        self._content = _read(self.file)
        self._declared = read_special_tokens(self.file.parent)
        if eos is not None:
            self._declared = self._declared.with_eos(eos, "tokenizer.eos")
        self._load()
        if self._sampling:
            console.warning(f"{self.file}: {self._sampling} is switched off for encoding")

    def _load(self) -> None:
        self.kind: Literal["sentencepiece", "tokenizer.json"] = (
            "tokenizer.json" if self.file.suffix == ".json" else "sentencepiece"
        )
        make = _TokenizersFile if self.kind == "tokenizer.json" else _SentencePiece
        try:
            backend: _SentencePiece | _TokenizersFile = make(self._content)
        except Exception as error:  # both libraries raise bare exceptions
            rule = f"is not a {self.kind} tokenizer ({' '.join(str(error).split())[:80]})"
            fix = "name a sentencepiece .model or a tokenizer.json"
            raise DataError(Problem(str(self.file), None, rule, fix)) from None
        self._backend: _Codec = backend
        self.vocab_size: int = backend.vocab_size
        self._sampling = backend.randomness
        undeclared = _usual_ids(backend)
        ids = {role: self._declared_id(role, undeclared[role], backend) for role in ROLES}
        if ids["eos"] is None:
            names = ", ".join(USUAL_NAMES["eos"])
            rule = f"declares no end-of-sequence token, and has no special one of {names}"
            fix = "declare eos_token in tokenizer_config.json, or set tokenizer.eos"
            raise DataError(Problem(str(self.file), None, rule, fix))
        self.eos_id: int = ids["eos"]
        self.bos_id, self.pad_id, self.unk_id = ids["bos"], ids["pad"], ids["unk"]
        others = (i for i in self._declared.eos_ids if i < self.vocab_size and i != self.eos_id)
        self.stop_ids: tuple[int, ...] = (self.eos_id, *others)
        self._tokens = {r: None if i is None else backend.token_of(i) for r, i in ids.items()}
        digest = hashlib.sha256(self._content)
        # Special tokens of the file alone need no declaration, and leave its plain digest.
        self._needs_declaration = ids != undeclared or len(self.stop_ids) > 1
        if self._needs_declaration:
            digest.update(repr((sorted(self._tokens.items()), self.stop_ids)).encode())
        self.digest = digest.hexdigest()

    def _declared_id(
        self, role: str, undeclared: int | None, backend: _SentencePiece | _TokenizersFile
    ) -> int | None:
        """The id of a role's token, as declared, or the usual one.

        Raises:
            DataError: the declared end-of-sequence token is unknown or ordinary text.
        """
        tokens = self._declared.tokens
        token = tokens.get(role)
        source = f"{self._declared.sources.get(role)}: eos_token"
        if token is None and role == "eos":
            if not self._declared.eos_ids or self._declared.eos_ids[0] >= self.vocab_size:
                return undeclared
            token = backend.token_of(self._declared.eos_ids[0])
            source = f"{self.file.parent / GENERATION}: eos_token_id"
        if token is None:
            return None if role in tokens else undeclared
        token_id = backend.id_of(token)
        if token_id is not None:
            backend.declare_special(token)
        if role == "eos" and token_id is None:
            rule = f"is not in the vocabulary of {self.file.name}"
            raise DataError(Problem(source, token, rule, "set tokenizer.eos to a special token"))
        if role == "eos" and not backend.is_special(token):
            rule = f"is ordinary text for {self.file.name}, not a special token"
            raise DataError(Problem(source, token, rule, "set tokenizer.eos to a special token"))
        return token_id

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "content": self._content, "declared": self._declared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.file, self._content = state["file"], state["content"]
        self._declared = state["declared"]
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
        except (RuntimeError, TypeError):  # raised by the two libraries on a lone surrogate
            found = re.search("[\ud800-\udfff]", text)
            if found is None:
                raise
        rule = f"is at character {found.start():,} of a document: a lone surrogate, not valid text"
        name = f"U+{ord(found[0]):04X}"
        raise DataError(Problem(name, None, rule, "repair or drop the document"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, without bos or eos."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens of a sentencepiece model have none."""
        return self._backend.decode([int(token) for token in ids])

    def save(self, folder: str | Path) -> Path:
        """Write the tokenizer into a folder under its usual name, and return that path.

        Special tokens that the file alone does not give are declared in tokenizer_config.json,
        and further stop ids in generation_config.json.
        """
        name = "tokenizer.json" if self.kind == "tokenizer.json" else "tokenizer.model"
        path = Path(folder) / name
        with replacing(path) as temporary:
            temporary.write_bytes(self._content)
        if self._needs_declaration:
            write_special_tokens(path.parent, self._tokens, self.stop_ids)
        return path


def load_tokenizer(path: str | Path, eos: str | None = None) -> Tokenizer:
    """Open a tokenizer folder, a sentencepiece .model or a tokenizer.json.

    Args:
        path: the folder or file.
        eos: the end-of-sequence token, in place of a declared one.

    Raises:
        DataError: there is no usable tokenizer.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in _MODEL_NAMES if (path / name).is_file()]
        if not found:
            fix = "name a folder that holds tokenizer.model or tokenizer.json"
            raise DataError(Problem(str(path), None, "holds no tokenizer", fix))
        path = found[0]
    return Tokenizer(path, eos)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(Problem(str(path), None, "no such file", "check the path")) from None
    except OSError as error:
        rule = error.strerror or type(error).__name__
        raise DataError(Problem(str(path), None, rule, "check the file")) from None
