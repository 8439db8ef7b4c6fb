"""Files of a corpus: compressed, in UTF-16, damaged, nested, or with schemas that differ."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from alibi_lm.data.config import SourceConfig
from alibi_lm.data.preparation.documents import DocumentReader
from alibi_lm.utils.errors import DataError

TEXTS = [f"document {i} has a few wörds" for i in range(30)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda raw: pa.compress(raw, codec="zstd", asbytes=True),
    "two_zst": lambda raw: b"".join(
        pa.compress(half, codec="zstd", asbytes=True) for half in (raw[:500], raw[500:])
    ),
    "utf16": lambda raw: raw.decode().encode("utf-16"),
    "utf16_gz": lambda raw: gzip.compress(raw.decode().encode("utf-16")),
}


def read(folder: Path, format: Any, **settings: Any) -> list[str]:
    reader = DocumentReader(SourceConfig("c", str(folder), format=format, **settings))
    return [document.text for document in reader]


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("name", ["a", "a.gz", "a.zst"])
def test_the_magic_number_decides_and_not_the_name(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / name).write_bytes(COMPRESSED[kind](LINES))
    assert read(tmp_path, "jsonl") == TEXTS
    (tmp_path / name).write_bytes(COMPRESSED[kind]("x\r\nyö".encode()))
    if kind != "two_zst":
        assert read(tmp_path, "text") == ["x\r\nyö"]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_tables_may_be_compressed(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": TEXTS})
    parquet.write_table(table, tmp_path / "p.parquet")
    raw = (tmp_path / "p.parquet").read_bytes()
    (tmp_path / "p.parquet").write_bytes(COMPRESSED[kind](raw))
    assert read(tmp_path, "parquet") == TEXTS


def test_a_text_that_begins_like_bzip2_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("BZh91 is a name")
    assert read(tmp_path, "text") == ["BZh91 is a name"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(LINES * 99)[:-300], r"b\.jsonl:\d+: cannot be read as gz"),
        (lzma.compress(LINES * 99)[:-30], r"b\.jsonl:?\d*: cannot be read as xz"),
        (COMPRESSED["zst"](LINES * 99)[:-30], r"b\.jsonl:?\d*: cannot be read as zst"),
        (LINES + b'{"m": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"b\.jsonl:31: is not JSON"),
        (LINES.decode().encode("utf-16")[:-1], r"b\.jsonl:30: is not utf-16"),
        (b"[{}", r"b\.jsonl:1: is not JSON"),
        (b'[{"text": "a"}, {"body": 1}]', r"b\.jsonl, element 1: has no field 'text'"),
        (b"PK\x03\x04" + bytes(range(256)), r"b\.jsonl: is not UTF-8 \(a zip archive\)"),
    ],
)
def test_a_bad_file_among_others_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    for name in ("a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path, "jsonl")


def test_a_binary_file_is_skipped_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\x04\x22\x4d\x18" + bytes(range(256)) * 9)
    (tmp_path / "b.jsonl").write_bytes(LINES + b'{"text": "\xe9"}\n')
    reader = DocumentReader(
        SourceConfig("c", str(tmp_path), format="jsonl", not_utf8="skip"),
    )
    assert [document.text for document in reader] == TEXTS
    assert reader.skipped == {"not_utf8_file": 1, "not_utf8": 1}
    assert reader.skipped_names == [
        f"{tmp_path}/a.jsonl (the whole file)", f"{tmp_path}/b.jsonl:31"
    ]  # fmt: skip


def write_table(kind: str, path: Path, table: pa.Table) -> None:
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=7)
        return
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_every_file_has_its_own_schema(tmp_path: Path, kind: str) -> None:
    tables = [
        pa.table({"text": pa.array([None] * 40, pa.null())}),
        pa.table({"extra": list(range(30)), "text": TEXTS}),
        pa.table({"text": pa.array(TEXTS, pa.large_string()), "extra": ["x"] * 30}),
        pa.table({"text": pa.array(TEXTS).dictionary_encode()}),
    ]
    for order in (tables, tables[::-1]):
        for index, table in enumerate(order):
            write_table(kind, tmp_path / f"{index}.{kind}", table)
        source = SourceConfig("c", str(tmp_path), format=kind)  # type: ignore[arg-type]
        reader = DocumentReader(source)
        assert [document.text for document in reader] == TEXTS * 3
        assert reader.skipped == {"no_text": 40}
        for skip in (1, 40, 45, 77, 129):
            expected = [text for table in order for text in table["text"].to_pylist()][skip:]
            rest = DocumentReader(source, position=skip)
            assert [d.text for d in rest] == [text for text in expected if text is not None]
    write_table(kind, tmp_path / f"9.{kind}", pa.table({"content": TEXTS}))
    with pytest.raises(DataError, match=rf"9\.{kind}.*: has no field 'text' \(it has: content"):
        read(tmp_path, kind)
    write_table(kind, tmp_path / f"9.{kind}", pa.table({"text": [*TEXTS[:9], "x"], "n": [1] * 10}))
    write_table(kind, tmp_path / f"8.{kind}", pa.table({"text": [1, 2]}))
    with pytest.raises(DataError, match=rf"8\.{kind}, row 0: holds int, not text"):
        read(tmp_path, kind)


def test_nested_fields_and_arrays_of_documents(tmp_path: Path) -> None:
    rows: list[Any] = [{"meta": {"text": text, "n": 1}} for text in TEXTS]
    for name in ("jsonl", "array", "parquet", "dotted"):
        (tmp_path / name).mkdir()
    path = tmp_path / "jsonl" / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"meta": None}]))
    assert read(tmp_path / "jsonl", "jsonl", text_field="meta.text") == TEXTS
    with pytest.raises(DataError, match=r"a\.jsonl:1: has no field 'meta\.body'"):
        read(tmp_path / "jsonl", "jsonl", text_field="meta.body")
    for number, content in enumerate((json.dumps(rows), "\n" + json.dumps(rows, indent=2))):
        (tmp_path / "array" / f"{number}.json").write_text(content)
    assert read(tmp_path / "array", "jsonl", text_field="meta.text") == TEXTS * 2
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / "a.parquet")
    assert read(tmp_path / "parquet", "parquet", text_field="meta.text") == TEXTS
    parquet.write_table(pa.table({"meta.text": TEXTS}), tmp_path / "dotted" / "a.parquet")
    assert read(tmp_path / "dotted", "parquet", text_field="meta.text") == TEXTS
