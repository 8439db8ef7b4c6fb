"""Converted tokenizers against sentencepiece itself."""

from __future__ import annotations

import io
import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer

from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.hf.exporting.tokenizer import convert_tokenizer
from alibi_lm.utils.errors import CheckpointError

NASTY = [
    "",
    " ",
    "   leading spaces",
    "trailing spaces   ",
    "\n\n\n\n\n\n  \n\n",
    "\n" * 1000,
    "\t\tif x:\n\t    return\t1",
    "line\r\nline\r\n\r\n",
    "lone\rcarriage\r\rreturns",
    "\u00a0no-break\u3000ideographic\u2028separator\u2029\u0085\x0b\x0c",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 and \U0001f3f3\ufe0f",
    "e\u0301 vs \u00e9, Z\u0351\u036b\u0343\u036aalgo",
    "\u05e9\u05dc\u05d5\u05dd \u202e\u0645\u0631\u062d\u0628\u0627\u202c",
    "NUL \x00 and \x00\x00 and \x7f\x1b[0m",
    "\ufeffbyte order mark",
    "\U0010ffff\ufffe\ufffd \U00020000\u4e2d\u6587",
    "<s>",
    "</s>",
    "<unk><pad></s><s>",
    "a <unk> b</s>c<s>d<pad>",
    "<0x0A>",
    "<0x00><0xFF> x = '<0x41>'",
    "\u2581",
    "a\u2581b \u2581\u2581 c",
    " ####" + "#" * 77 + " ---- " + "-" * 1001,
    " " * 1237 + "x" + " " * 17 + "y",
]
ONE_MEGABYTE = [
    "a" * 1_000_000,
    " " * 999_999,
    "x = [1, 2, 3]; " * 66_667,
    "\u00e9\U0001f600" * 160_000,
]


def standard_library(max_chars: int) -> list[str]:
    """Source files of Python's standard library, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(text)
        total += len(text)
        if total > max_chars:
            break
    return texts


def train(kind: str, lines: list[str], vocab_size: int, **settings: Any) -> bytes:
    """A sentencepiece model as the project trains it; unigram scores in steps of 1/64."""
    out = io.BytesIO()
    chosen: dict[str, Any] = dict(
        model_type=kind, vocab_size=vocab_size, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        unk_id=0, eos_id=1, bos_id=2, pad_id=3, minloglevel=2, num_threads=2,
        max_sentence_length=100_000,
    )  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, **(chosen | settings)
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(out.getvalue())
    if kind == "unigram":
        for piece in proto.pieces:
            if piece.type == 1:
                piece.score = round(piece.score * 64) / 64
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return standard_library(2_000_000)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def pair(request: Any, texts: list[str], tmp_path_factory: Any) -> tuple[Any, Any, Path]:
    """The sentencepiece processor, the loaded HF tokenizer, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "source.model"
    lines = [line for text in texts[:40] for line in text.splitlines(keepends=True)]
    source.write_bytes(train(request.param, lines, 1500))
    out = folder / "out"
    out.mkdir()
    convert_tokenizer(Tokenizer(source), out)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source))
    return processor, AutoTokenizer.from_pretrained(out), out


def test_is_fast_with_the_special_ids(pair: tuple[Any, Any, Path]) -> None:
    processor, tokenizer, out = pair
    assert tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == processor.get_piece_size()
    assert (tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, 3)
    for token_id in range(len(tokenizer)):
        piece = processor.id_to_piece(token_id).replace("\u2581", " ")
        assert tokenizer.convert_ids_to_tokens(token_id) == piece
    assert (out / "tokenizer.model").exists()


def test_ids_of_real_text(pair: tuple[Any, Any, Path], texts: list[str]) -> None:
    processor, tokenizer, _ = pair
    for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("number", range(len(NASTY)))
def test_ids_of_nasty_text(pair: tuple[Any, Any, Path], number: int) -> None:
    processor, tokenizer, out = pair
    text = NASTY[number]
    ids = tokenizer(text)["input_ids"]
    if "\u2581" in text:
        assert ids == load_tokenizer(out / "tokenizer.model").encode(text)
        assert tokenizer.decode(ids) == text
    else:
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == processor.decode(ids) == text
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.encode(text) == ids
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize("number", range(len(ONE_MEGABYTE)))
def test_ids_of_a_line_of_one_megabyte(pair: tuple[Any, Any, Path], number: int) -> None:
    processor, tokenizer, _ = pair
    text = ONE_MEGABYTE[number]
    ids = tokenizer(text)["input_ids"]
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == text


def test_ids_of_random_text(pair: tuple[Any, Any, Path]) -> None:
    processor, tokenizer, _ = pair
    draw = random.Random(0)
    for alphabet in ("ab ", " \n\t", "<>/s0xAunkpd", "aA_ .=\r\n#", "e\u0301\u200d\U0001f600\x00"):
        for _ in range(300):
            text = "".join(draw.choices(alphabet, k=draw.randrange(1, 60)))
            assert tokenizer(text)["input_ids"] == processor.encode(text), repr(text)


def test_raw_backend_gives_no_special_token(pair: tuple[Any, Any, Path]) -> None:
    """Readers of tokenizer.json that know nothing of tokenizer_config.json."""
    processor, _, out = pair
    backend = BackendTokenizer.from_file(str(out / "tokenizer.json"))
    text = "a <unk> b</s>c<s>d<pad><0x0A>"
    assert backend.encode(text).ids == processor.encode(text)


def test_special_tokens_decode_and_survive_a_save(
    pair: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    processor, tokenizer, _ = pair
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = " x</s>y"
    ids = processor.encode(text)
    for loaded in (tokenizer, again):
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode([*ids, 1, 3], skip_special_tokens=True) == text
        assert loaded.decode([*ids, 1]) == text + "</s>"
    batch = tokenizer(["a", "a longer text"], padding=True)
    assert batch["input_ids"][0][0] == 3
    assert batch["attention_mask"][0][0] == 0


def test_periodic_text_keeps_the_order_of_equal_merges(tmp_path: Path) -> None:
    """Pieces such as aba = ab+a = a+ba: overlapping merges of one score."""
    draw = random.Random(1)
    lines = ["".join(draw.choices("ab", k=40)) for _ in range(400)]
    source = tmp_path / "source.model"
    source.write_bytes(train("bpe", lines, 300 + 60))
    out = tmp_path / "out"
    out.mkdir()
    convert_tokenizer(Tokenizer(source), out)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source))
    tokenizer = AutoTokenizer.from_pretrained(out)
    for _ in range(3000):
        text = "".join(draw.choices("ab", k=draw.randrange(1, 80)))
        assert tokenizer(text)["input_ids"] == processor.encode(text), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_of_characters_that_the_model_never_saw(kind: str, tmp_path: Path) -> None:
    """Without < and digits in the vocabulary the byte pieces' names must still not be found."""
    lines = ["\u03b1\u03b2\u03b3 \u03b4\u03b5\u03b6 xA", "\u03b1\u03b2 \u03b3\u03b4 s>"] * 50
    source = tmp_path / "source.model"
    source.write_bytes(train(kind, lines, 300, hard_vocab_limit=False))
    out = tmp_path / "out"
    out.mkdir()
    convert_tokenizer(Tokenizer(source), out)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source))
    tokenizer = AutoTokenizer.from_pretrained(out)
    plain = [text for text in NASTY if "\u2581" not in text]
    for text in [*plain, "\u03b1<0x41>\u03b2<s>\u03b3 </s> <unk>\u03b4"]:
        assert tokenizer(text)["input_ids"] == processor.encode(text), repr(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"user_defined_symbols": ["\t", "self.", "<sep>"]},
        {"add_dummy_prefix": True},
        {"add_dummy_prefix": True, "remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
    ],
    ids=["user_defined", "dummy_prefix", "extra_spaces", "nfkc"],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_models_trained_elsewhere(
    kind: str, settings: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    lines = [line for text in texts[:10] for line in text.splitlines()]
    source = tmp_path / "source.model"
    source.write_bytes(train(kind, lines, 700, **settings))
    out = tmp_path / "out"
    out.mkdir()
    convert_tokenizer(Tokenizer(source), out)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source))
    tokenizer = AutoTokenizer.from_pretrained(out)
    short = ["self.x", "\t\tself.y <sep>z", "  lead <sep> ", "", "a  b\n\tself.self.", "<s>"]
    for text in [*short, *texts[:9]]:
        ids = tokenizer(text)["input_ids"]
        assert ids == processor.encode(text), repr(text[:80])
        assert tokenizer.decode(ids) == processor.decode(ids)


def test_existing_tokenizer_json_is_written_through(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers, processors

    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.add_special_tokens(["</s>"])
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    source = tmp_path / "source.json"
    out = tmp_path / "out"
    out.mkdir()
    for processor in (backend.post_processor, processors.ByteLevel()):
        backend.post_processor = processor
        backend.save(str(source))
        convert_tokenizer(Tokenizer(source), out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer("ab a b")["input_ids"] == [4, 2, 3]
        assert tokenizer.eos_token_id == 1
        assert tokenizer.bos_token_id is None
    assert (out / "tokenizer.json").read_bytes() == source.read_bytes()


def test_word_models_and_unused_pieces_are_refused(texts: list[str], tmp_path: Path) -> None:
    lines = texts[0].splitlines()
    source = tmp_path / "source.model"
    source.write_bytes(train("char", lines, 300, byte_fallback=False, hard_vocab_limit=False))
    with pytest.raises(CheckpointError, match=r"source\.model: is neither a BPE nor a unigram"):
        convert_tokenizer(Tokenizer(source), tmp_path)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(train("bpe", lines, 400))
    proto.pieces[300].type = 5
    source.write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match="unused pieces"):
        convert_tokenizer(Tokenizer(source), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.model"]
