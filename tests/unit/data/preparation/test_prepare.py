"""Recipes to prepared folders, in one process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from alibi_lm.config_loading import build
from alibi_lm.data.config import RecipeConfig
from alibi_lm.data.indexed import TokenFile, TokenFileWriter
from alibi_lm.data.manifest import check_tokenizer, manifest_for
from alibi_lm.data.preparation import tokenization
from alibi_lm.data.preparation.prepare import load_recipe, prepare
from alibi_lm.data.token_stream import TokenStream
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.utils import progress
from alibi_lm.utils.errors import ConfigError, DataError

REPOSITORY = Path(__file__).resolve().parents[4]


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 20 to 400 words of a small language, with line ends of all kinds."""
    rng = random.Random(seed)
    words = [
        "".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 7))) for _ in range(300)
    ]
    ends = [" ", " ", " ", "\n", "\r\n", "\n    "]
    return [
        "".join(rng.choice(words) + rng.choice(ends) for _ in range(rng.randint(20, 400)))
        for _ in range(count)
    ]


def write_corpus(folder: Path, texts: Iterable[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_bytes(text.encode())
    return folder


def recipe_of(output: Path, *sources: dict[str, Any], **options: Any) -> RecipeConfig:
    raw = {"output": str(output), "sources": list(sources), "num_workers": 1,
           "tokenizer": {"vocab_size": 300}} | options  # fmt: skip
    return build(RecipeConfig, raw)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("prepare") / "corpus", make_texts(120))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[RecipeConfig, Path]:
    output = tmp_path_factory.mktemp("prepare") / "out"
    source = {"name": "small", "path": str(corpus), "validation_fraction": 0.2,
              "min_long_validation": 12, "long_chars": 1500}  # fmt: skip
    recipe = recipe_of(output, source)
    return recipe, prepare(recipe)


def share(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256


def texts_of(output: Path, name: str) -> list[str]:
    tokenizer = load_tokenizer(output / "tokenizer")
    file = TokenFile(output / name)
    documents = [file.document(i).tolist() for i in range(file.num_documents)]
    assert all(document.count(tokenizer.eos_id) == 1 for document in documents)
    assert all(document[-1] == tokenizer.eos_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def test_every_document_comes_back_from_its_split(made: tuple[RecipeConfig, Path]) -> None:
    output = made[1].parent
    texts = make_texts(120)
    longest = sorted((text for text in texts if len(text) >= 1500), key=share)[:12]
    validation = [text for text in texts if share(text) < 0.2 or text in longest]
    assert texts_of(output, "small_validation") == validation
    assert texts_of(output, "small_train") == [t for t in texts if t not in validation]
    assert len(validation) > len([text for text in texts if share(text) < 0.2])


def test_manifest_says_what_there_is(made: tuple[RecipeConfig, Path]) -> None:
    recipe, path = made
    manifest = json.loads(path.read_text())
    texts = {split: texts_of(path.parent, f"small_{split}") for split in ("train", "validation")}
    for split, documents in texts.items():
        counts = manifest["corpora"]["small"][split]
        assert counts["documents"] == len(documents)
        assert counts["chars"] == sum(map(len, documents))
        assert counts["bytes"] == sum(len(text.encode()) for text in documents)
        assert counts["tokens"] == TokenFile(path.parent / f"small_{split}").num_tokens
    sizes = np.load(path.parent / "small_validation.bytes.npy")
    assert sizes.tolist() == [len(text.encode()) for text in texts["validation"]]
    for name, entry in manifest["files"].items():
        content = (path.parent / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["tokenizer"]["digest"] == load_tokenizer(path.parent / "tokenizer").digest
    assert manifest["recipe"]["sources"][0]["path"] == recipe.sources[0].path
    names = {
        str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if file.is_file()
    }
    assert names == {*manifest["files"], "manifest.json"}


def test_tokenizer_of_another_corpus_is_refused(
    made: tuple[RecipeConfig, Path], tmp_path: Path
) -> None:
    folder = made[1].parent
    check_tokenizer(folder / "small_train", load_tokenizer(folder / "tokenizer"))
    write_corpus(tmp_path / "c", make_texts(40, seed=9))
    other = prepare(recipe_of(tmp_path / "o", {"name": "c", "path": str(tmp_path / "c")})).parent
    with pytest.raises(DataError, match="is not the tokenizer of .*small_train"):
        check_tokenizer(folder / "small_train", load_tokenizer(other / "tokenizer"))
    assert manifest_for(tmp_path / "foreign") is None
    check_tokenizer(tmp_path / "foreign", load_tokenizer(other / "tokenizer"))


def test_a_second_time_nothing_is_done(
    made: tuple[RecipeConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.stat().st_mtime_ns for file in made[1].parent.rglob("*")}
    assert prepare(made[0]) == made[1]
    assert before == {file: file.stat().st_mtime_ns for file in made[1].parent.rglob("*")}
    assert capsys.readouterr().out.count("\n") == 1


def test_another_recipe_is_refused_by_key_unless_overwritten(corpus: Path, tmp_path: Path) -> None:
    first = {"name": "a", "path": str(corpus)}
    prepare(recipe_of(tmp_path / "out", first, {**first, "name": "gone"}))
    content = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir() if f.is_file()}
    other = recipe_of(tmp_path / "out", {**first, "max_chars": 1000}, tokenizer={"vocab_size": 320})
    with pytest.raises(DataError) as caught:
        prepare(other)
    keys = [problem.key for problem in caught.value.problems]
    assert "sources.a.max_chars" in keys
    assert "tokenizer.vocab_size" in keys
    assert content == {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir() if f.is_file()}
    prepare(other, overwrite=True)
    assert load_tokenizer(tmp_path / "out" / "tokenizer").vocab_size == 320
    assert not (tmp_path / "out" / "gone_train.bin").exists()
    assert prepare(recipe_of(tmp_path / "out", {**first, "max_chars": 1000}, num_workers=2,
                             tokenizer={"vocab_size": 320}))  # fmt: skip


def test_changed_sources_are_refused_and_missing_outputs_made_again(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", make_texts(40))
    recipe = recipe_of(tmp_path / "out", {"name": "a", "path": str(corpus)})
    manifest = prepare(recipe)
    before = (tmp_path / "out" / "a_train.bin").read_bytes()
    (tmp_path / "out" / "a_train.bin").write_bytes(before[:-2])
    prepare(recipe)
    assert (tmp_path / "out" / "a_train.bin").read_bytes() == before
    (corpus / "0000.txt").write_text("other " * 100)
    with pytest.raises(DataError, match=r"source a: changed after"):
        prepare(recipe)
    prepare(recipe, overwrite=True)
    assert "other other" in "".join(texts_of(manifest.parent, "a_train"))


def test_split_is_independent_of_names_order_and_workers(tmp_path: Path) -> None:
    texts = make_texts(60)
    source = {"name": "a", "validation_fraction": 0.3}
    splits = []
    for number, order in enumerate((texts, texts[::-1], texts + texts[:20])):
        corpus = write_corpus(tmp_path / str(number), order)
        recipe = recipe_of(tmp_path / f"out{number}", {**source, "path": str(corpus)})
        splits.append(set(texts_of(prepare(recipe).parent, "a_validation")))
    assert splits[0] == splits[1] == splits[2]
    assert not splits[2] & set(texts_of(tmp_path / "out2", "a_train"))


def test_two_corpora_an_existing_tokenizer_and_jsonl(
    made: tuple[RecipeConfig, Path], corpus: Path, tmp_path: Path
) -> None:
    texts = make_texts(30, seed=3)
    lines = [json.dumps({"body": text}) for text in texts]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    model = made[1].parent / "tokenizer" / "tokenizer.model"
    recipe = recipe_of(
        tmp_path / "out",
        {"name": "a", "path": str(corpus), "max_documents": 5, "validation_fraction": 0.0},
        {"name": "b", "path": str(tmp_path / "b.jsonl"), "format": "jsonl", "text_field": "body"},
        tokenizer={"path": str(model)},
    )
    output = prepare(recipe).parent
    assert load_tokenizer(output / "tokenizer").digest == load_tokenizer(model).digest
    assert texts_of(output, "a_train") == make_texts(120)[:5]
    assert TokenFile(output / "a_validation").num_documents == 0
    found = texts_of(output, "b_train") + texts_of(output, "b_validation")
    assert sorted(found) == sorted(texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "no/such/folder"}, "no/such/folder: does not exist"),
        ({"min_chars": 10**6}, "source a: has no document left .*'too_short': 60"),
        ({"min_long_validation": 3, "long_chars": 10**6}, "only 0 documents have 1,000,000"),
        ({"min_long_validation": 60, "long_chars": 1}, "tokenizer: cannot be trained"),
    ],
)
def test_bad_sources_are_one_line_and_leave_no_tokens(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus", make_texts(60))
    source = {"name": "a", "path": str(corpus)} | changes
    with pytest.raises((DataError, ConfigError), match=message):
        prepare(recipe_of(tmp_path / "out", source))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path / "out", {"name": "a", "path": str(corpus)})
    add = TokenFileWriter.add
    calls = 0

    def full(self: TokenFileWriter, tokens: Any, lengths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.prefix))
        add(self, tokens, lengths)

    monkeypatch.setattr(tokenization, "BATCH_BYTES", 4000)
    monkeypatch.setattr(TokenFileWriter, "add", full)
    with pytest.raises(DataError, match="no space left on device"):
        prepare(recipe, record_seconds=0.0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    monkeypatch.undo()
    prepare(recipe)
    prepare(recipe_of(tmp_path / "whole", {"name": "a", "path": str(corpus)}))
    for name in ("a_train.bin", "a_train.idx", "a_validation.bin", "a_validation.bytes.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_existing_tokenizer_that_loses_something_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_texts(40)), model_writer=model, vocab_size=60,
        minloglevel=2)  # fmt: skip
    (tmp_path / "nfkc.model").write_bytes(model.getvalue())
    corpus = write_corpus(tmp_path / "corpus", ["abc abc", "two  spaces", "\u2581"])
    source = {"name": "a", "path": str(corpus), "validation_fraction": 0.0}
    recipe = recipe_of(tmp_path / "out", source, tokenizer={"path": str(tmp_path / "nfkc.model")})
    with pytest.raises(DataError, match=r"0002\.txt: U\+2581: is at character 0"):
        prepare(recipe)
    (corpus / "0002.txt").unlink()
    manifest = json.loads(prepare(recipe).read_text())
    assert manifest["corpora"]["a"]["lossy_documents"] == 1
    assert "1 documents do not decode to themselves" in capsys.readouterr().err


def test_a_prepared_file_is_a_stream_as_it_is(made: tuple[RecipeConfig, Path]) -> None:
    file = TokenFile(made[1].parent / "small_train")
    eos_id = load_tokenizer(made[1].parent / "tokenizer").eos_id
    stream = TokenStream(file, eos_id)
    assert (stream.num_inserted, stream.num_tokens) == (0, file.num_tokens)
    other = TokenStream(file, eos_id + 1)
    assert other.num_inserted == file.num_documents


class Killed(BaseException):
    """Stands for a kill: nothing in the library catches it."""


def test_a_kill_before_or_after_any_rename_is_mended_by_the_same_command(
    made: tuple[RecipeConfig, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = {"path": str(made[1].parent / "tokenizer")}
    source = {"name": "a", "path": str(corpus), "max_documents": 40, "validation_fraction": 0.3}
    whole = prepare(recipe_of(tmp_path / "whole", source, tokenizer=tokenizer)).parent
    replace = os.replace
    crashes = 0
    for number in range(1000):
        output = tmp_path / str(number)
        calls = 0

        def dying(old: Any, new: Any, stop: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == stop // 2 + 1 and stop % 2:
                raise Killed
            replace(old, new)
            if calls == stop // 2 + 1:
                raise Killed

        recipe = recipe_of(output, source, tokenizer=tokenizer)
        monkeypatch.setattr(os, "replace", dying)
        try:
            prepare(recipe)
        except Killed:
            crashes += 1
        else:
            break
        finally:
            monkeypatch.undo()
        prepare(recipe)
        for name in json.loads((whole / "manifest.json").read_text())["files"]:
            assert (output / name).read_bytes() == (whole / name).read_bytes(), number
        assert not (output / ".partial").exists()
    assert crashes > 20


def test_two_processes_do_not_prepare_the_same_folder(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "out", {"name": "a", "path": str(corpus)})
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="out: is in use by another process"):
        prepare(recipe)
    os.close(descriptor)
    prepare(recipe)


def test_recipe_rules() -> None:
    raw = {
        "output": "x", "num_workers": 0, "tokenizer": {"vocab_size": 10, "kind": "bpee"},
        "sources": [{"name": "a", "path": "p"}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean bpe"):
        build(RecipeConfig, raw)
    raw["tokenizer"] = {"vocab_size": 10, "max_bytes": 0, "character_coverage": 2.0}
    raw["sources"] = [
        {"name": "../a", "path": [], "min_chars": -1, "max_chars": 0, "max_documents": 0,
         "validation_fraction": 1.0, "min_long_validation": 3},
        {"name": "../A", "path": ["a", "b"], "format": "hub", "max_chars": 5, "long_chars": 6},
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        build(RecipeConfig, raw)
    keys = {problem.key for problem in caught.value.problems}
    first = ("name", "path", "min_chars", "max_chars", "max_documents", "validation_fraction",
             "long_chars")  # fmt: skip
    assert keys == {
        "num_workers", "tokenizer.vocab_size", "tokenizer.max_bytes",
        "tokenizer.character_coverage", "sources.1.name", "sources.1.path", "sources.1.long_chars",
        *(f"sources.0.{name}" for name in first)}  # fmt: skip


@pytest.mark.parametrize("path", sorted((REPOSITORY / "data").glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path, ["num_workers=2"])
    assert recipe.sources
    assert recipe.num_workers == 2


def test_an_output_that_is_a_file_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match="output = .*file is a file"):
            prepare(recipe_of(output, {"name": "a", "path": str(corpus)}))
    assert (tmp_path / "file").read_text() == "mine"


def test_progress_outside_a_terminal_is_a_line_with_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    with progress.Progress("tokenizing c", 4_000_000, 1_000_000) as bar:
        bar.advance(2_000_000)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("tokenizing c:  75% 3.00M/4.00M [")
    assert "B/s]" in out
    assert bar.summary().startswith("2.0 MB in ")
