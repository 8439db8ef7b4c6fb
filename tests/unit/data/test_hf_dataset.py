"""Token files as a `datasets.Dataset`, and back through a recipe's own format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import alibi_lm
from alibi_lm.data.hf_dataset import load_corpus
from alibi_lm.data.indexed import TokenFile, TokenFileWriter
from alibi_lm.utils.errors import DataError

DOCUMENTS = [[5, 6, 7, 1], [1], list(range(2, 900)) + [1], [9, 1]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_documents_come_back(dtype: type, tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "code_train", dtype)
    for document in DOCUMENTS:
        writer.add_document(document)
    writer.finish()
    data = alibi_lm.load_corpus(tmp_path / "code_train")
    assert data["input_ids"][:] == DOCUMENTS
    assert data.shuffle(seed=3).select([0])[0]["input_ids"] in DOCUMENTS
    assert [row["input_ids"] for row in data.to_iterable_dataset(num_shards=2)] == DOCUMENTS
    assert data.with_format("torch")[2]["input_ids"].tolist() == DOCUMENTS[2]
    lengths = data.map(lambda row: {"length": len(row["input_ids"])}, keep_in_memory=True)
    assert lengths["length"][:] == [4, 1, 899, 2]
    data.to_parquet(str(tmp_path / "copy.parquet"))
    from datasets import load_dataset

    copy = load_dataset("parquet", data_files=str(tmp_path / "copy.parquet"), split="train",
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
    assert copy["input_ids"][:] == DOCUMENTS


def test_tokens_are_the_mapped_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TokenFileWriter(tmp_path / "code_train", np.uint16)
    writer.add_document([5, 6, 1])
    file = writer.finish()
    monkeypatch.setattr("alibi_lm.data.hf_dataset.TokenFile", lambda prefix: file)
    data = load_corpus(tmp_path / "code_train")
    values = data.data.column(0).chunk(0).values
    assert values.buffers()[1].address == file.read(0, 3).ctypes.data


def test_an_empty_corpus_and_a_missing_one(tmp_path: Path) -> None:
    TokenFileWriter(tmp_path / "empty", np.uint16).finish()
    assert len(load_corpus(tmp_path / "empty")) == TokenFile(tmp_path / "empty").num_documents == 0
    with pytest.raises(DataError, match="no such file"):
        load_corpus(tmp_path / "missing")
