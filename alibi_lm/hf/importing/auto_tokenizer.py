"""A folder's tokenizer, loaded by `AutoTokenizer`, behind our own interface."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alibi_lm.data.special_tokens import read_special_tokens
from alibi_lm.data.tokenizer import Tokenizer, switch_off_sampling
from alibi_lm.hf.parity.transformers_reference import quiet
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sha256
from alibi_lm.utils.logging import console

_FILES = ("tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds tokenizer files."""
    return any((folder / name).is_file() for name in _FILES)


class _AutoBackend:
    """The `Tokenizer` backend over a `transformers` tokenizer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.vocab_size = max(len(model), 1 + max(model.get_vocab().values(), default=-1))
        self.unk_id, self.bos_id = model.unk_token_id, model.bos_token_id
        self.eos_id, self.pad_id = model.eos_token_id, model.pad_token_id

    def encode(self, text: str) -> list[int]:
        # Text that spells a special token is text.
        ids = self._model(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(ids["input_ids"])

    def encode_array(self, text: str) -> NDArray[np.integer]:
        return np.array(self.encode(text), np.int32)

    def decode(self, ids: list[int]) -> str:
        text = self._model.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


class AutoTokenizerAdapter(Tokenizer):
    """The tokenizer of a Hugging Face folder; it adds no special tokens."""

    def __init__(self, folder: Path) -> None:
        """Load it without remote code.

        Raises:
            CheckpointError: it cannot be loaded, or has no end-of-sequence token.
        """
        from transformers import AutoTokenizer

        try:
            with quiet():
                model = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                if getattr(model, "sp_model_kwargs", None):  # enable_sampling, for example
                    model = AutoTokenizer.from_pretrained(
                        folder, local_files_only=True, trust_remote_code=False, sp_model_kwargs={}
                    )
        except Exception as error:  # the classes raise errors of many kinds
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            rule = f"its tokenizer cannot be loaded ({detail})"
            raise CheckpointError(Problem(str(folder), None, rule, "restore the folder")) from None
        self.file = next(folder / name for name in _FILES if (folder / name).is_file())
        self.kind = "tokenizer.json" if self.file.suffix == ".json" else "sentencepiece"
        self.digest = sha256(self.file)
        sampling = switch_off_sampling(model.backend_tokenizer.model) if model.is_fast else None
        if sampling:
            console.warning(f"{self.file}: {sampling} is switched off for encoding")
        backend = _AutoBackend(model)
        self._backend = backend
        if backend.eos_id is None:
            rule = "its tokenizer has no end-of-sequence token"
            fix = "set eos_token in tokenizer_config.json"
            raise CheckpointError(Problem(str(folder), None, rule, fix))
        self.vocab_size, self.eos_id = backend.vocab_size, backend.eos_id
        self.unk_id, self.bos_id, self.pad_id = backend.unk_id, backend.bos_id, backend.pad_id
        others = read_special_tokens(folder).eos_ids
        self.stop_ids = (self.eos_id, *(token for token in others if token != self.eos_id))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a transformers tokenizer cannot be pickled")


def digest_of(tokenizer: Tokenizer) -> str:
    """Digest of a tokenizer: its file and the class that reads it."""
    kind = type(tokenizer).__name__
    return hashlib.sha256(f"{kind} {tokenizer.digest}".encode()).hexdigest()
