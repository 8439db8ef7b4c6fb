"""Token ids of 10 MB of real text, of every kind of tokenizer, both ways."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.hf.exporting.tokenizer import convert_tokenizer
from tests.unit.hf.exporting.test_export_tokenizer import NASTY, ONE_MEGABYTE, train

TEN_MEGABYTES = 10_000_000
SPECIALS = ["<unk>", "</s>", "<s>", "<pad>"]


def real_text() -> Iterator[str]:
    """Python source of the standard library, then of installed packages, in a fixed order."""
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[name]).rglob("*.py")):
            if name == "stdlib" and "site-packages" in path.parts:
                continue
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found, total = [], 0
    for text in real_text():
        found.append(text)
        total += len(text.encode())
        if total >= TEN_MEGABYTES:
            return found
    raise AssertionError(f"{total:,} bytes only")


def byte_level(lines: list[str], folder: Path) -> Path:
    """A tokenizer.json as `tokenizers` trains it."""
    backend = BackendTokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(lines, trainer)
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    backend.save(str(folder / "source.json"))
    return folder / "source.json"


@pytest.fixture(scope="module", params=["bpe", "unigram", "tokenizer.json"])
def pair(request: Any, texts: list[str], tmp_path_factory: Any) -> tuple[Any, Tokenizer, Any]:
    """The library's own tokenizer, ours of the same file, and the exported one."""
    folder = tmp_path_factory.mktemp("kind")
    lines = [line for text in texts[:40] for line in text.splitlines(keepends=True)]
    if request.param == "tokenizer.json":
        source = byte_level(lines, folder)
        reference: Any = BackendTokenizer.from_file(str(source))
        reference.encode_special_tokens = True
    else:
        source = folder / "source.model"
        source.write_bytes(train(request.param, lines, 1500))
        reference = SentencePieceProcessor(model_file=str(source))
    (folder / "out").mkdir()
    ours = Tokenizer(source)
    convert_tokenizer(ours, folder / "out")
    return reference, ours, AutoTokenizer.from_pretrained(folder / "out")


@pytest.mark.slow
def test_ten_megabytes_both_ways(pair: tuple[Any, Tokenizer, Any], texts: list[str]) -> None:
    reference, ours, exported = pair
    reserved = {ours.unk_id, ours.bos_id, ours.eos_id, ours.pad_id}
    total = 0
    for text in texts:
        ids = exported(text)["input_ids"]
        assert ids == ours.encode(text)
        assert exported.decode(ids) == ours.decode(ids) == text
        assert not reserved & set(ids)
        if "\u2581" not in text:  # sentencepiece reads it as a space
            found = reference.encode(text)
            assert ids == (found if isinstance(found, list) else found.ids)
            assert reference.decode(ids) == text
        total += len(text.encode())
    assert total >= TEN_MEGABYTES


def test_the_nasty_list_of_a_tokenizer_json(tmp_path: Path) -> None:
    """As test_hf_tokenizer.py has it for sentencepiece."""
    source = byte_level(["def f(x):\n", "    return x\n", "<s> </s>\n"] * 9, tmp_path)
    ours = Tokenizer(source)
    (tmp_path / "out").mkdir()
    convert_tokenizer(ours, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (exported.unk_token_id, exported.eos_token_id, exported.pad_token_id) == (0, 1, 3)
    for text in [*NASTY, *ONE_MEGABYTE]:
        ids = exported(text)["input_ids"]
        assert ids == ours.encode(text), repr(text[:60])
        assert exported.decode(ids) == ours.decode(ids) == text
        assert not {0, 1, 2, 3} & set(ids)
