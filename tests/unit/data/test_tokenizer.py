"""Tokenizers: nothing lost, control tokens never reached from text, foreign files read."""

from __future__ import annotations

import argparse
import inspect
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alibi_lm.data.config import TokenizerConfig
from alibi_lm.data.preparation.tokenizer_training import train_tokenizer
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.utils.errors import ConfigError, DataError

TEXTS = [
    inspect.getsource(argparse),
    "def f(self):\n        return self.x  # indented\n\n\n" * 40,
    "if a:\r\n\tb = 1\r\n\t\tc = 22\r\n" * 40,
    "The <s> and </s> and <unk> and <pad> of <0x0A> are text here. " * 60,
    "naïve café — “quoted” 東京 \U0001f469\u200d\U0001f680 \u2581 \0 \ufeff " * 20,
]
WEIRD = [
    "", " ", "   ", "\t", "\t\t x", " leading", "trailing  ", "a  b   c", "\n", "\n\n\n", "\r",
    "a\rb", "a\r\nb\r\n", "\r\r\n\n", "\0", "a\0b", "\x01\x1f\x7f", "\u2581", "a\u2581 \u2581b",
    " \u2581\u2581 ", "\u2585", "\u2047", "\ufffd", "\ufeffbom", "\u00a0\u3000\u2003", "\u200b",
    "e\u0301 é", "ﬁ ½ Å", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0010ffff", "\ud7ff\ue000", "العربية", "한국어 日本語",
    "<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<0xE2><0x96><0x81>", "<s", "x</s>y", "\u2581<s>",
    " " * 1000, "\t" * 100, "ab" * 5000, "1234567890.5e-10",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return train_tokenizer(TEXTS, TokenizerConfig(kind=request.param, vocab_size=400), path)


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_array(text).tolist() == ids
    assert all(4 <= token < tokenizer.vocab_size for token in ids)


def test_weird_text_round_trips(tokenizer: Tokenizer) -> None:
    for text in [*WEIRD, *TEXTS]:
        check_round_trip(tokenizer, text)


PIECES = st.sampled_from([text for text in WEIRD if 0 < len(text) < 12])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
@example("".join(WEIRD))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    check_round_trip(tokenizer, text)


def test_every_character_of_the_basic_plane_round_trips(tokenizer: Tokenizer) -> None:
    text = "".join(chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000)
    check_round_trip(tokenizer, text)


def test_a_lone_surrogate_is_refused_by_name(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(DataError, match=r"U\+DC80: is at character 3"):
            encode("abc\udc80")


def test_ids_and_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = (tokenizer.unk_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 400
    assert tokenizer.kind == "sentencepiece"
    saved = tokenizer.save(tmp_path / "folder")
    assert saved.name == "tokenizer.model"
    for path in (saved, tmp_path / "folder"):
        again = load_tokenizer(path)
        assert again.digest == tokenizer.digest
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_indentation_and_newlines_become_pieces(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("\n        ")) <= 3


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_deterministic(tmp_path: Path, kind: Any) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=380)
    files = [train_tokenizer(TEXTS, config, tmp_path / name).file for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "texts", "message"),
    [
        (90_000, TEXTS, r"tokenizer.vocab_size = 90000: is too large for the documents"),
        (280, TEXTS, r"tokenizer.vocab_size = 280: is too small"),
        (300, [], "tokenizer: cannot be trained"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, vocab_size: int, texts: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size), tmp_path / "t.model")
    assert list(tmp_path.iterdir()) == []


def test_a_line_of_a_million_characters_round_trips(tokenizer: Tokenizer) -> None:
    """It would take hours were encoding quadratic."""
    rng = random.Random(0)
    check_round_trip(tokenizer, "".join(rng.choice("abc (=x1") for _ in range(1_000_000)))


def foreign_model(folder: Path, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world, this is text"] * 20), model_writer=model,
        vocab_size=40, minloglevel=2, hard_vocab_limit=False, **options)  # fmt: skip
    path = folder / "foreign.model"
    path.write_bytes(model.getvalue())
    return path


def test_foreign_sentencepiece_model(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(foreign_model(tmp_path))
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        0, 1, 2, None)  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    with pytest.raises(DataError, match=r"U\+2581: is at character 5"):
        tokenizer.encode("hello\u2581world")


def test_foreign_model_with_its_own_name_for_the_end(tmp_path: Path) -> None:
    path = foreign_model(tmp_path, eos_id=-1, control_symbols=["<|endoftext|>"])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert load_tokenizer(path).eos_id == reference.piece_to_id("<|endoftext|>")
    with pytest.raises(DataError, match="foreign.model: declares no end-of-sequence token"):
        load_tokenizer(foreign_model(tmp_path, eos_id=-1))


def byte_level(path: Path, special: list[str]) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    model.train_from_iterator(TEXTS, trainer)
    model.save(str(path))
    return model


def test_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    reference = byte_level(path, ["<pad>", "<|endoftext|>"])
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.kind, tokenizer.eos_id, tokenizer.pad_id) == ("tokenizer.json", 1, 0)
    assert tokenizer.vocab_size == reference.get_vocab_size()
    for text in [*TEXTS, *WEIRD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(TEXTS[0]) == reference.encode(TEXTS[0]).ids
    assert not {0, 1} & set(tokenizer.encode("<|endoftext|> <pad>"))
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("<|endoftext|>") == tokenizer.encode("<|endoftext|>")
    with pytest.raises(DataError, match="U.DC80"):
        tokenizer.encode("\udc80")
    byte_level(path, ["<pad>"])
    with pytest.raises(DataError, match="tokenizer.json: declares no end-of-sequence token"):
        load_tokenizer(path)


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("broken.model", "broken.json"):
        (tmp_path / name).write_bytes(b"not a tokenizer")
        with pytest.raises(DataError, match=f"{name}: is not a"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match="missing.model: no such file"):
        load_tokenizer(tmp_path / "missing.model")
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_unigram_scores_add_up_exactly_in_any_precision(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    texts = [inspect.getsource(module) for module in (argparse, inspect)]
    path = tmp_path / "tokenizer.model"
    train_tokenizer(texts, TokenizerConfig(kind="unigram", vocab_size=600), path)
    processor = SentencePieceProcessor(model_file=str(path))
    scores = [
        processor.get_score(i)
        for i in range(len(processor))
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    ]
    assert len(scores) > 50
    assert all(score * 64 == round(score * 64) for score in scores)
    assert len({round(score) for score in scores}) > 2
