"""A sentencepiece model as a fast Hugging Face tokenizer with the same ids.

What sentencepiece does is in its `src/bpe_model.cc`, `src/unigram_model.cc` and
`src/normalizer.cc`; what a `tokenizer.json` means, in the `tokenizers` crate's `src/models`.
The two differ in three ways, which the conversion handles:

* sentencepiece never produces a control, unknown or byte piece for text that looks like one.
  `tokenizers` matches special tokens in text unless `split_special_tokens` is set, and its
  Unigram finds every piece of the vocabulary, so such pieces get a score that is never chosen.
* sentencepiece ranks a BPE merge by the score of the resulting piece; `tokenizers` wants a list.
* U+2581 is sentencepiece's own sign for a space. `alibi_lm.data.tokenizer` encodes a literal one as
  its three UTF-8 bytes; here pieces are spelled with real spaces, so that U+2581 is a character
  that no piece holds and byte fallback gives the same three.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import write_json, write_text

SPACE = "\u2581"
"""sentencepiece's sign for a space inside a piece."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


def convert_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer` into the folder `out` so that `AutoTokenizer` loads it as a fast one.

    Writes tokenizer.json and tokenizer_config.json, and for sentencepiece tokenizer.model too. An
    existing tokenizer.json is copied, without settings that make ids depend on more than the
    text: post-processors that add special tokens (`transformers` obeys them whatever
    tokenizer_config.json says), BPE dropout, truncation and padding.

    Raises:
        CheckpointError: the sentencepiece model uses something that tokenizer.json cannot say.
    """
    if tokenizer.kind == "sentencepiece":
        content = sentencepiece_to_json(tokenizer.file)
        _write_compact(out / "tokenizer.json", content)
        shutil.copyfile(tokenizer.file, out / "tokenizer.model")
    else:
        content = json.loads(tokenizer.file.read_text(encoding="utf-8"))
        if _depends_on_text_alone(content):
            shutil.copyfile(tokenizer.file, out / "tokenizer.json")
        else:
            content |= {"post_processor": None, "truncation": None, "padding": None}
            content["model"]["dropout"] = None
            _write_compact(out / "tokenizer.json", content)
    write_json(out / "tokenizer_config.json", _tokenizer_config(tokenizer, content))


def _depends_on_text_alone(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json adds no tokens and samples, cuts and pads nothing."""
    processor = (content.get("post_processor") or {}).get("type")
    others = (content["model"].get("dropout"), content.get("truncation"), content.get("padding"))
    return processor in (None, "ByteLevel") and not any(others)


def _write_compact(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False) + "\n")


def _tokenizer_config(tokenizer: Tokenizer, content: dict[str, Any]) -> dict[str, Any]:
    """The settings under which `transformers` gives the plain ids and the exact text back."""
    names = _names_by_id(content)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
    }
    # No bos: training never saw one, and readers such as lm-evaluation-harness would put it first.
    for role in ("eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{role}_id")
        if token_id is not None:
            config[f"{role}_token"] = names[token_id]
    return config


def _names_by_id(content: dict[str, Any]) -> dict[int, str]:
    """Token id to token of a parsed tokenizer.json, added tokens included."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        names = {token_id: name for name, token_id in vocab.items()}
    else:
        names = {token_id: item[0] for token_id, item in enumerate(vocab)}
    names.update({token["id"]: token["content"] for token in content.get("added_tokens", [])})
    return names


def sentencepiece_to_json(path: Path) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the ids of the sentencepiece model at `path`.

    Control pieces are not declared as added tokens: those are matched in plain text by readers
    that know nothing of `split_special_tokens`. `transformers` adds them from
    tokenizer_config.json, under their own ids.

    Raises:
        CheckpointError: the model is neither BPE nor unigram, or uses what has no equal.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    _refuse(path, proto)
    build: Callable[[Any], dict[str, Any]] = (
        _bpe_model if proto.trainer_spec.model_type == _BPE else _unigram_model
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(proto),
        "normalizer": _normalizer(proto.normalizer_spec),
        "pre_tokenizer": _pre_tokenizer(proto),
        "post_processor": None,
        "decoder": _decoder(proto),
        "model": build(proto),
    }


def _refuse(path: Path, proto: Any) -> None:
    problems = []
    kind = proto.trainer_spec.model_type
    if kind not in (_BPE, _UNIGRAM):
        problems.append(Problem(str(path), None, "is neither a BPE nor a unigram model",
                                "train one of these kinds"))  # fmt: skip
    if kind == _BPE and any(piece.type == _UNUSED for piece in proto.pieces):
        problems.append(Problem(str(path), None, "has unused pieces, which BPE splits again and "
                                "a tokenizer.json cannot",
                                "export without a tokenizer"))  # fmt: skip
    if proto.normalizer_spec.add_dummy_prefix:
        if proto.trainer_spec.treat_whitespace_as_suffix:
            problems.append(Problem(str(path), None, "adds a space at the end of the text, which a "
                                    "tokenizer.json cannot",
                                    "export without a tokenizer"))  # fmt: skip
        if kind == _BPE and any(piece.type == _USER_DEFINED for piece in proto.pieces):
            problems.append(Problem(str(path), None, "has user-defined pieces and adds a space "
                                    "before the text, which a tokenizer.json cannot do together",
                                    "export without a tokenizer"))  # fmt: skip
    if problems:
        raise CheckpointError(*problems)


def _bpe_model(proto: Any) -> dict[str, Any]:
    """The model section: pieces, and merges in the order in which sentencepiece makes them.

    sentencepiece merges the adjacent pair whose joined piece scores highest, the leftmost first
    among equals, whatever the two halves are. So every split of a piece into two pieces is a merge.
    """
    pieces = proto.pieces
    normal = {
        _spelled(proto, p): (-p.score, token_id)
        for token_id, p in enumerate(pieces)
        if p.type == _NORMAL
    }
    ranked = []
    for name, (cost, token_id) in normal.items():
        for cut in range(1, len(name)):
            if name[:cut] in normal and name[cut:] in normal:
                ranked.append((cost, token_id, cut, name))
    ranked.sort()
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[proto.trainer_spec.unk_id].piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {_spelled(proto, p): token_id for token_id, p in enumerate(pieces)},
        "merges": [[name[:cut], name[cut:]] for _, _, cut, name in ranked],
    }


def _spelled(proto: Any, piece: Any) -> str:
    """The piece with real spaces."""
    escaped = proto.normalizer_spec.escape_whitespaces and piece.type in (_NORMAL, _USER_DEFINED)
    return str(piece.piece.replace(SPACE, " ")) if escaped else str(piece.piece)


def _unigram_model(proto: Any) -> dict[str, Any]:
    """The model section: pieces with their scores, and no way to the reserved ones.

    `tokenizers` looks for all pieces in the text, so a reserved piece must cost more than the
    single characters that it is spelled with. Its unknown score is the lowest score less 10, as in
    sentencepiece, where reserved pieces do not count; it only matters to characters that no piece
    holds, and for those there is no choice to make.

    sentencepiece adds scores up in fp32, `tokenizers` in fp64: where two cuts of a text cost
    nearly the same they may differ, unless the scores are such that fp32 sums are exact.
    """
    normal = [p.score for p in proto.pieces if p.type == _NORMAL]
    longest = max(len(p.piece) for p in proto.pieces if p.type != _NORMAL)
    out_of_reach = longest * min(0.0, *normal) - 10.0

    def score(piece: Any) -> float:
        if piece.type == _USER_DEFINED:  # what sentencepiece's bonus comes to, whatever the length
            return -0.1
        return piece.score if piece.type == _NORMAL else out_of_reach

    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "vocab": [[_spelled(proto, piece), score(piece)] for piece in proto.pieces],
    }


def _added_tokens(proto: Any) -> list[dict[str, Any]]:
    """BPE's user-defined pieces: found whole in the normalized text, before any merge."""
    if proto.trainer_spec.model_type != _BPE:
        return []
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    return [{"id": token_id, "content": _spelled(proto, piece), "normalized": True, **flags}
            for token_id, piece in enumerate(proto.pieces)
            if piece.type == _USER_DEFINED]  # fmt: skip


def _normalizer(spec: Any) -> dict[str, Any] | None:
    """sentencepiece's normalization in its order: characters, spaces, dummy prefix."""
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"\A +| +\z"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    return _sequence("normalizers", steps)


def _pre_tokenizer(proto: Any) -> dict[str, Any] | None:
    """Keep Unigram from finding a reserved piece whose characters are unknown.

    An unknown character costs more than any piece, so the score of `_unigram_model` does not help
    there. Such a character is in no piece, so cutting the text around it changes nothing else.
    """
    spec = proto.trainer_spec
    if spec.model_type != _UNIGRAM or not spec.byte_fallback:
        return None
    normal = [_spelled(proto, p) for p in proto.pieces if p.type in (_NORMAL, _USER_DEFINED)]
    known = set().union(*normal)
    reserved = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL, _BYTE)]
    cuts = sorted({c for c in set().union(*reserved) if c not in known})
    if not cuts:
        return None
    pattern = "|".join(re.escape(character) for character in cuts)
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
            "invert": False}  # fmt: skip


def _decoder(proto: Any) -> dict[str, Any] | None:
    """Pieces to text: bytes joined, the dummy prefix taken off again."""
    steps: list[dict[str, Any]] = []
    if proto.trainer_spec.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", steps)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(name: str, steps: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    listed = list(steps)
    if len(listed) == 1:
        return listed[0]
    return {"type": "Sequence", name: listed} if listed else None
