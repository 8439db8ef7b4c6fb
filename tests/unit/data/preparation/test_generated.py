"""Recipes with documents that are made: exact, restartable, refused where they do not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from alibi_lm.config_loading import build
from alibi_lm.data.config import RecipeConfig
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.preparation import generated, tokenization
from alibi_lm.data.preparation.prepare import prepare
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.tasks import passkey
from alibi_lm.utils.errors import ConfigError, DataError, UserInterrupt

LINE = "def {0}(value): return {0}_of(value, {1})  # a line of the corpus\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "corpus"
    folder.mkdir()
    for number in range(30):
        lines = (LINE.format("abcdefgh"[i % 8] * (1 + i % 5), i) for i in range(20))
        (folder / f"{number}.py").write_text(f"document_{number} = 1\n" + "".join(lines))
    return folder


def recipe_of(output: Path, corpus: Path, **options: Any) -> RecipeConfig:
    recall = {"max_tokens": 300, "filler": "code", "seed": 3} | options.pop("recall", {})
    made = {"name": "made", "format": "recall", "max_documents": 200, "recall": recall,
            "validation_fraction": 0.1} | options.pop("made", {})  # fmt: skip
    sources = [{"name": "code", "path": str(corpus), "validation_fraction": 0.3}, made]
    raw = {"output": str(output), "sources": sources, "num_workers": 1,
           "tokenizer": {"vocab_size": 400}} | options  # fmt: skip
    return build(RecipeConfig, raw)


def digests(folder: Path) -> dict[str, str]:
    names = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    output = tmp_path_factory.mktemp("generated") / "whole"
    return prepare(recipe_of(output, corpus)).parent


def test_documents_are_exact_and_split_by_hash(whole: Path) -> None:
    tokenizer = load_tokenizer(whole / "tokenizer")
    total = 0
    texts = set()
    for split in ("train", "validation"):
        file = TokenFile(whole / f"made_{split}")
        assert set(file.document_lengths.tolist()) == {300}
        for number in range(file.num_documents):
            ids = file.document(number).tolist()
            assert ids[-1] == tokenizer.eos_id
            assert tokenizer.eos_id not in ids[:-1]
            text = tokenizer.decode(ids[:-1])
            share = int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256
            assert (share < 0.1) == (split == "validation")
            texts.add(text)
        total += file.num_documents
    assert total == len(texts) == 200
    assert {"secret" in text for text in texts} == {True, False}


def test_filler_is_of_training_documents_only(whole: Path) -> None:
    tokenizer = load_tokenizer(whole / "tokenizer")
    file = TokenFile(whole / "code_validation")
    held_out = [tokenizer.decode(file.document(i).tolist()[:-1]) for i in range(file.num_documents)]
    names = [text.partition(" ")[0] for text in held_out]
    assert len(names) >= 3
    made = TokenFile(whole / "made_train")
    texts = [tokenizer.decode(made.document(i).tolist()) for i in range(made.num_documents)]
    assert not any(f"{name} " in text for name in names for text in texts)
    assert any("document_" in text for text in texts)


def test_the_manifest_holds_settings_and_their_digest(whole: Path, corpus: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["recipe"]["sources"][1]["recall"]["kinds"] == ["statements", "passkey", "pairs"]
    assert manifest["corpora"]["made"]["train"]["longest_document_tokens"] == 300
    assert prepare(recipe_of(whole, corpus)) == whole / "manifest.json"  # nothing to do
    with pytest.raises(DataError, match=r"sources.made.recall.seed = '?4'?"):
        prepare(recipe_of(whole, corpus, recall={"seed": 4}))


@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_in_the_middle_the_same_command_gives_the_same_bytes(
    whole: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    document_generator = generated.document_generator
    asked: list[int] = []

    def dying(*arguments: Any) -> Any:
        make = document_generator(*arguments)

        def document(index: int) -> tuple[str, ...]:
            asked.append(index)
            if len(asked) == 90:
                raise KeyboardInterrupt
            assert make is not None
            return make(index)

        return None if make is None else document

    monkeypatch.setattr("alibi_lm.data.preparation.prepare.document_generator", dying)
    monkeypatch.setattr(tokenization, "BATCH_BYTES", 4000)
    recipe = recipe_of(tmp_path / "out", corpus, num_workers=workers)
    with pytest.raises(UserInterrupt) as caught:
        prepare(recipe, record_seconds=0.0)
    kept = f"prepare keeps what is done in {tmp_path / 'out' / '.partial'}"
    assert str(caught.value) == f"interrupted: {kept}; run the same command to resume"
    assert not (tmp_path / "out" / "manifest.json").exists()
    prepare(recipe, record_seconds=0.0)
    assert asked[90] > 0, "it began anew"
    assert digests(tmp_path / "out") == digests(whole)


def test_a_recipe_of_made_documents_alone(tmp_path: Path) -> None:
    sources = [
        {"name": "recall", "format": "recall", "max_documents": 30,
         "recall": {"max_tokens": 400, "kinds": ["passkey"]}},
        {"name": "reasoning", "format": "reasoning", "max_documents": 30,
         "reasoning": {"max_tokens": 90, "lengths": [1, 20]}},
    ]  # fmt: skip
    raw = {"output": str(tmp_path / "out"), "sources": sources, "num_workers": 1,
           "tokenizer": {"vocab_size": 350}}  # fmt: skip
    folder = prepare(build(RecipeConfig, raw)).parent
    assert set(TokenFile(folder / "reasoning_train").document_lengths.tolist()) == {90}
    file = TokenFile(folder / "recall_train")
    assert set(file.document_lengths.tolist()) == {400}
    tokenizer = load_tokenizer(folder / "tokenizer")
    assert tokenizer.decode(file.document(0).tolist()).startswith(passkey.HEAD)
    for number in ("12345", "90210"):
        assert len(tokenizer.encode(number)) == 5


def test_what_does_not_fit_leaves_nothing_behind(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is too short for one fact"):
        prepare(recipe_of(tmp_path / "out", corpus, recall={"max_tokens": 40}))
    assert not (tmp_path / "out").exists()


def test_rules_of_made_sources(corpus: Path, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"made": {"path": "x"}}, "path = .* is not read by format: recall"),
        ({"made": {"max_documents": None}}, "max_documents: must say how many"),
        ({"made": {"min_long_validation": 1, "long_chars": 5}}, "min_long_validation"),
        ({"made": {"recall": None}}, "recall: belongs to format: recall"),
        ({"made": {"format": "text", "path": "x"}}, "belongs to format: recall"),
        ({"made": {"reasoning": {"max_tokens": 9}}}, "belongs to format: reasoning"),
        ({"recall": {"filler": "made"}}, "filler = .* is not a source of this recipe that is read"),
        ({"recall": {"kinds": []}}, "kinds"),
        ({"recall": {"dense": 2}}, "dense = 2: is more than 1"),
        ({"recall": {"max_tokens": 0}}, "max_tokens = 0"),
        ({"recall": {"seed": -1}}, "seed = -1"),
        ({"made": {"format": "reasoning", "recall": None,
                   "reasoning": {"max_tokens": 9, "lengths": [5, 2]}}}, "lengths"),
    ]  # fmt: skip
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            recipe_of(tmp_path, corpus, **options)
