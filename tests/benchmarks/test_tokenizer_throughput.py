"""The benchmark of tokenizing measures what it says; its times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

from alibi_lm.config_loading import build
from alibi_lm.data.config import RecipeConfig, TokenizerConfig
from alibi_lm.data.preparation.tokenizer_training import train_tokenizer
from alibi_lm.data.tokenizer import Tokenizer
from tests.benchmarks.tokenizer_throughput import _library_call, benchmark_tokenize

TEXTS = [f"def number_{n}(value):\n    return value + {n}\n" * 20 for n in range(60)]


def recipe(folder: Path) -> RecipeConfig:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.py").write_text(text, encoding="utf-8")
    source = {"name": "code", "path": str(folder / "*.py")}
    return build(RecipeConfig, {"output": str(folder / "out"), "sources": [source]})


def sentencepiece(folder: Path) -> Tokenizer:
    return train_tokenizer(TEXTS, TokenizerConfig(vocab_size=330), folder / "tokenizer.model")


def words(folder: Path) -> Tokenizer:
    vocabulary = {word: n for n, word in enumerate(["<unk>", "</s>", "def", "return", "value"])}
    model = LibraryTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def test_everything_is_measured_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, tokenizer = recipe(tmp_path), sentencepiece(tmp_path)
    path = tmp_path / "tokenize.json"
    result = benchmark_tokenize(small, tokenizer, 2, num_bytes=100_000, repeats=2, path=path)
    assert json.loads(path.read_text()) == result
    assert set(result["seconds"]) == {"ours 1", "library 1", "ours 2", "library 2"}
    assert result["bytes"] >= 100_000
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize("make", [sentencepiece, words])
def test_the_librarys_call_is_the_same_work(make: type, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    expected = [tokenizer.encode(text) for text in TEXTS]
    for threads in (1, 2):
        assert _library_call(tokenizer)(TEXTS, threads) == expected
