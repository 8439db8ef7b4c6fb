"""What a run reads: which rank gets which samples, and what is refused before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.data.indexed import TokenFileWriter
from alibi_lm.data.manifest import MANIFEST
from alibi_lm.train import data
from alibi_lm.train.data import open_training_data
from alibi_lm.utils.errors import ConfigError, DataError, UserError

LENGTH = 4


def write(prefix: Path, tokens: list[int]) -> Path:
    """A token file of one document."""
    writer = TokenFileWriter(prefix, np.uint16)
    writer.add_document(tokens)
    writer.finish()
    return prefix


def config(*corpora: Path, validation: tuple[Path, ...] = (), **sections: Any) -> Config:
    """A run over corpora of weights 1, 2, ...; samples of 4 inputs, 8 a step, 2 at a time."""
    train = {
        "sequence_length": LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "validation_tokens": 16,
    }
    raw = {
        "run": {"dir": "none"},
        "model": {"vocab_size": 100} | sections.get("model", {}),
        "data": {
            "corpora": [{"prefix": str(p), "weight": float(n)} for n, p in enumerate(corpora, 1)],
            "validation": list(map(str, validation)),
        }
        | sections.get("data", {}),
        "train": train | sections.get("train", {}),
    }
    return build(Config, raw)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", list(range(90)))


def refused(settings: Config, kind: type[UserError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        open_training_data(settings)
    return str(caught.value)


# ---- samples ------------------------------------------------------------------------------------


def test_ranks_read_a_steps_samples_in_turns_and_all_of_them(corpus: Path) -> None:
    inputs = open_training_data(config(corpus))
    step = 1
    expected = torch.from_numpy(inputs.blend.samples(range(8 * step, 8 * step + 8)))
    shares = [inputs.micro_batches(step, rank, 2) for rank in (0, 1)]
    for share in shares:
        assert [tuple(batch.shape) for batch in share] == [(2, LENGTH + 1)] * 2
        assert all(batch.dtype == torch.int64 for batch in share)
    batches_in_order = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert torch.equal(torch.cat(batches_in_order), expected)
    assert torch.equal(torch.cat(inputs.micro_batches(step, 0, 1)), expected)
    assert not torch.equal(torch.cat(inputs.micro_batches(0, 0, 1)), expected)


def test_bad_ids_far_into_a_corpus_are_named_by_their_samples(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_LOOKED_AT", 10)
    inputs = open_training_data(config(corpus, model={"vocab_size": 88}))
    samples = inputs.blend.samples(range(inputs.blend.num_windows[0]))
    (bad,) = np.flatnonzero((samples == 88).any(axis=1))  # the last of 22 windows
    step, place = divmod(int(bad), 8)
    first = 8 * step + place // 2 * 2
    for rank in (0, 1):
        if rank == place // 2 % 2:
            with pytest.raises(DataError, match=f"samples {first} to {first + 1}: holds token id"):
                inputs.micro_batches(step, rank, 2)
        else:
            inputs.micro_batches(step, rank, 2)


@pytest.mark.parametrize("ids", [[0, 99], [99], [0]])
def test_ids_up_to_the_last_of_the_vocabulary_are_good(ids: list[int], tmp_path: Path) -> None:
    tokens = (ids * 30)[:30]
    assert open_training_data(config(write(tmp_path / "c", tokens))).facts()["corpora"]


def test_ids_beyond_the_vocabulary_are_refused_at_the_start(corpus: Path, tmp_path: Path) -> None:
    words = refused(config(corpus, model={"vocab_size": 89}))
    assert words.startswith(f"{corpus}.bin: holds token id 89, outside model.vocab_size = 89")
    late = write(tmp_path / "validation", [*range(20), 100])
    words = refused(config(corpus, validation=(late,)))
    assert words.startswith(f"{late}.bin: holds token id 100, outside model.vocab_size = 100")


def test_where_a_step_comes_from_and_what_identifies_the_data(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, list(range(90))) for name in ("a", "b")]
    inputs = open_training_data(config(*paths))
    corpora = set()
    for step in range(8):
        corpus, epoch, window = inputs.blend.where(8 * step)
        assert inputs.where(step) == (
            f"samples {8 * step} to {8 * step + 7} (the first is window {window} of "
            f"{paths[corpus]}, epoch {epoch})"
        )
        corpora.add(corpus)
    assert corpora == {0, 1}
    assert inputs.facts() == {
        "corpora": [
            {"digest": file.digest, "tokens": 90, "weight": weight}
            for file, weight in zip(inputs.corpora, (1.0, 2.0), strict=True)
        ],
        "tokenizer": None,
    }


# ---- validation ---------------------------------------------------------------------------------


def test_validation_windows_are_shared_out_and_filled_up(corpus: Path, tmp_path: Path) -> None:
    files = tuple(write(tmp_path / f"v{n}", [n * 40 + k for k in range(40)]) for n in (0, 1))
    settings = config(corpus, validation=files, train={"validation_tokens": 48})
    inputs = open_training_data(settings)
    # 24 targets of each file, in windows of 4, 2 at a time.
    whole = [
        [[file + start + place for place in range(LENGTH + 1)] for start in (first, first + 4)]
        for file in (0, 40)
        for first in (0, 8, 16)
    ]
    (alone,) = [inputs.validation_windows(LENGTH, 0, 1)]
    assert [batch.tolist() for batch in alone if batch is not None] == whole
    assert None not in alone
    for ranks in (2, 4, 5):
        shares = [inputs.validation_windows(LENGTH, rank, ranks) for rank in range(ranks)]
        assert {len(share) for share in shares} == {-(-6 // ranks)}
        for rank, share in enumerate(shares):
            read = [None if batch is None else batch.tolist() for batch in share]
            filled = [*whole, *[None] * (-6 % ranks)]
            assert read == filled[rank::ranks]
    # Twice the length: half the windows, one at a time.
    longer = inputs.validation_windows(2 * LENGTH, 0, 1)
    assert [tuple(batch.shape) for batch in longer if batch is not None] == [(1, 9)] * 6


def test_validation_without_a_corpus_is_refused(corpus: Path) -> None:
    words = refused(config(corpus, train={"validation_interval": 3}))
    assert "train.validation_interval = 3: there is no validation corpus" in words
    assert open_training_data(config(corpus)).validation == []


def test_validation_lengths_must_fit_the_corpora_and_the_model(
    corpus: Path, tmp_path: Path
) -> None:
    exact = write(tmp_path / "exact", list(range(2 * LENGTH + 1)))
    short = write(tmp_path / "short", list(range(2 * LENGTH)))
    train = {"validation_interval": 3, "validation_multiples": [1, 2]}
    assert open_training_data(config(corpus, validation=(exact,), train=train)).validation
    words = refused(config(corpus, validation=(exact, short), train=train))
    assert words.count("validation_multiples") == 1
    assert f"= 2: needs 9 tokens; {short} has 8; leave it out" in words.replace("2.0", "2")
    unused = config(corpus, validation=(short,), train=train | {"validation_interval": None})
    assert open_training_data(unused).validation
    learned = {"position": "learned", "max_positions": 2 * LENGTH}
    fits = config(corpus, validation=(exact,), train=train, model=learned)
    assert open_training_data(fits).validation
    learned["max_positions"] = 2 * LENGTH - 1
    words = refused(config(corpus, validation=(exact,), train=train, model=learned))
    assert "is 8 tokens, and model.max_positions is 7" in words


def test_every_missing_file_is_named(corpus: Path, tmp_path: Path) -> None:
    missing = [tmp_path / name for name in ("a", "b", "c")]
    settings = config(missing[0], corpus, missing[1], validation=(missing[2],))
    settings.data.tokenizer = str(tmp_path / "tokenizer")
    words = refused(settings)
    for path in (*missing, tmp_path / "tokenizer"):
        assert str(path) in words
    assert str(corpus) not in words


# ---- vocabulary and tokenizer -------------------------------------------------------------------


def with_manifest(corpus: Path, vocab_size: int) -> None:
    """Say beside a token file which tokenizer made it."""
    content = {
        "recipe": {},
        "tokenizer": {"vocab_size": vocab_size, "digest": "d" * 64, "eos_id": 1},
        "files": {f"{corpus.name}.bin": {"bytes": corpus.with_suffix(".bin").stat().st_size}},
    }
    (corpus.parent / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def opened(settings: Config) -> int | None:
    open_training_data(settings)
    return settings.model.vocab_size


def test_the_vocabulary_is_what_was_asked_for_or_the_tokenizers(corpus: Path) -> None:
    words = refused(config(corpus, model={"vocab_size": None}), ConfigError)
    assert "model.vocab_size: is not set, and the data names no tokenizer" in words
    with_manifest(corpus, 95)
    assert opened(config(corpus, model={"vocab_size": None})) == 95
    assert opened(config(corpus, model={"vocab_size": 95})) == 95
    assert opened(config(corpus, model={"vocab_size": 128})) == 128  # padded
    words = refused(config(corpus, model={"vocab_size": 94}), ConfigError)
    assert "model.vocab_size = 94: is less than the tokenizer's 95 ids" in words


def test_a_tokenizer_comes_before_the_manifest_and_must_be_the_corpuss(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SimpleNamespace(vocab_size=97, digest="d" * 64, eos_id=1, file="model")
    monkeypatch.setattr(data, "load_tokenizer", lambda _: tokenizer)
    with_manifest(corpus, 95)
    settings = config(corpus, model={"vocab_size": None}, data={"tokenizer": str(tmp_path)})
    inputs = open_training_data(settings)
    assert settings.model.vocab_size == 97
    assert inputs.facts()["tokenizer"] == "d" * 64
    tokenizer.digest = "e" * 64
    other = write(tmp_path / "other", list(range(60)))  # no manifest speaks of it
    words = refused(config(corpus, validation=(other,), data={"tokenizer": str(tmp_path)}))
    assert f"is not the tokenizer of {corpus}" in words
    assert str(other) not in words
