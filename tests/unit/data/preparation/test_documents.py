"""Reading corpora: exact documents, filters, names of what is wrong."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alibi_lm.data.config import SourceConfig
from alibi_lm.data.preparation.documents import DocumentReader
from alibi_lm.data.preparation.sources import expand, fingerprint, list_files
from alibi_lm.utils.errors import DataError

TEXTS: list[str | None] = [
    "a\r\nb\rc\n", "2024-01-01", "", "\ufeffx\0y", "東京 \U0001f469\u200d\U0001f680", None, "12",
    "true", "\u2028 \x85 \x0c", "last\n\n",
]  # fmt: skip
KEPT = [text for text in TEXTS if text]


def write_text(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        if text is not None:
            (folder / f"{number}.txt").write_bytes(text.encode())


def write_jsonl(folder: Path) -> None:
    lines = [json.dumps({"n": i if i % 2 else "x", "text": text}) for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode())


def write_jsonl_gz(folder: Path) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    with gzip.open(folder / "a.jsonl.gz", "wb") as file:
        file.write("\r\n".join(lines).encode())


def write_parquet(folder: Path) -> None:
    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    pq.write_table(table, folder / "a [1]*.parquet", row_group_size=3)


def write_arrow(folder: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(
        sink, table.schema
    ) as writer:  # fmt: skip
        writer.write_table(table, max_chunksize=4)


FORMATS: dict[str, tuple[Any, Callable[[Path], None]]] = {
    "text": ("text", write_text),
    "jsonl": ("jsonl", write_jsonl),
    "jsonl.gz": ("jsonl", write_jsonl_gz),
    "parquet": ("parquet", write_parquet),
    "arrow": ("arrow", write_arrow),
    "hub": ("hub", write_parquet),
}


@pytest.mark.parametrize("name", FORMATS)
def test_documents_are_exact_and_reading_goes_on_anywhere(tmp_path: Path, name: str) -> None:
    kind, write = FORMATS[name]
    folder = tmp_path / "corpus [x]" if kind != "hub" else tmp_path
    folder.mkdir(exist_ok=True)
    write(folder)
    source = SourceConfig("c", str(folder), format=kind)
    reader = DocumentReader(source)
    documents = list(reader)
    assert [document.text for document in documents] == KEPT
    assert [document.num_bytes for document in documents] == [len(t.encode()) for t in KEPT]
    assert reader.skipped["empty"] == 1
    assert reader.skipped["no_text"] == (0 if kind == "text" else 1)
    for stop in range(len(KEPT)):
        first = DocumentReader(source)
        head = [document.text for document, _ in zip(first, range(stop), strict=False)]
        state = json.loads(json.dumps(first.state()))
        second = DocumentReader.from_state(source, state)
        # zip has taken one more document out of the reader than it gave
        tail = [document.text for document in second]
        assert head + KEPT[stop : stop + 1] + tail == KEPT
        assert second.state() == reader.state()


def test_a_hub_dataset_that_is_not_streamed(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    source = SourceConfig("c", str(tmp_path), format="hub", streaming=False)
    assert [document.text for document in DocumentReader(source)] == KEPT


def test_filters_and_limit(tmp_path: Path) -> None:
    for number, size in enumerate([5, 1, 9, 6, 7, 8]):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    reader = DocumentReader(SourceConfig("c", str(tmp_path), min_chars=5, max_chars=8))
    assert [len(document.text) for document in reader] == [5, 6, 7, 8]
    assert reader.skipped == {"too_short": 1, "too_long": 1}
    reader = DocumentReader(
        SourceConfig("c", str(tmp_path), min_chars=5, max_chars=8, max_documents=2)
    )
    assert [len(document.text) for document in reader] == [5, 6]
    assert list(DocumentReader.from_state(reader.source, reader.state())) == []


def test_folders_globs_include_exclude_and_order(tmp_path: Path) -> None:
    for name in ("b/x.py", "a/test/y.py", "a/z.py", "test/w.py", "v.py", "v.txt", "b/.h.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path, tmp_path / "b" / "circle")

    def names(path: Any, **options: Any) -> list[str]:
        source = SourceConfig("c", path, **options)
        return [str(Path(file.path).relative_to(tmp_path)) for file in list_files(source)]

    folder = str(tmp_path)
    assert names(folder, include="*.py", exclude=["test/*", "*/circle/*"]) == [
        "a/test/y.py", "a/z.py", "b/.h.py", "b/x.py", "v.py"]  # fmt: skip
    assert names(folder, include="*.py", exclude=["test/*", "*/test/*", "b/*"]) == [
        "a/z.py",
        "v.py",
    ]
    assert names(f"{folder}/*/*.py", exclude=["test/*"]) == ["a/z.py", "b/x.py"]
    assert names([f"{folder}/v.txt", f"{folder}/v.*"]) == ["v.txt", "v.py"]
    with pytest.raises(DataError, match="no file left after exclude"):
        names(folder, exclude=["*"])
    with pytest.raises(DataError, match=r"include = \*\.md"):
        names(folder, include="*.md")
    with pytest.raises(DataError, match="nothing/here: does not exist"):
        names([folder, "nothing/here"])


def test_an_empty_folder_and_a_file_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: does not exist or holds no file"):
        list(DocumentReader(SourceConfig("c", str(tmp_path / "empty"))))
    os.symlink(tmp_path / "gone", tmp_path / "dangling.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError) as caught:
        list(DocumentReader(SourceConfig("c", str(tmp_path))))
    assert "dangling.txt: No such file" in str(caught.value)
    assert "pipe.txt: is not a regular file" in str(caught.value)


def test_not_utf8_is_refused_by_name_or_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"b\.txt: is not UTF-8"):
        list(DocumentReader(SourceConfig("c", str(tmp_path))))
    reader = DocumentReader(SourceConfig("c", str(tmp_path), not_utf8="skip"))
    assert [document.text for document in reader] == ["good"]
    assert reader.skipped == {"not_utf8": 1}
    assert reader.skipped_names == [str(tmp_path / "b.txt")]


def test_jsonl_lines_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def read(line: bytes, **options: Any) -> DocumentReader:
        path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
        reader = DocumentReader(SourceConfig("c", str(path), format="jsonl", **options))
        list(reader)
        return reader

    for line, message in (
        (b"{", r"a\.jsonl:2: is not JSON"),
        (b'{"body": "x"}', r"a\.jsonl:2: has no field 'text' \(it has: body\)"),
        (b"[1]", r"a\.jsonl:2: has no field 'text' \(it has: list\)"),
        (b'{"text": 5}', r"a\.jsonl:2: holds int, not text"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: is not UTF-8"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: is not UTF-8"),
    ):
        with pytest.raises(DataError, match=message):
            read(line)
    assert read(b'{"text": "\\ud800"}', not_utf8="skip").skipped == {"not_utf8": 1}
    with pytest.raises(DataError, match="has no field 'body'"):
        read(b"", text_field="body")


@pytest.mark.parametrize(("kind", "write"), [("parquet", write_parquet), ("arrow", write_arrow)])
def test_a_typed_file_that_is_wrong_is_named(
    tmp_path: Path, kind: Any, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match="body"):
        list(DocumentReader(SourceConfig("c", str(tmp_path), format=kind, text_field="body")))
    file = next(tmp_path.iterdir())
    file.write_bytes(b"nonsense")
    with pytest.raises(
        DataError, match=rf"\.{kind}: cannot be read as {kind} from row 0 on \(ArrowInvalid"
    ):
        list(DocumentReader(SourceConfig("c", str(tmp_path), format=kind)))


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    source = SourceConfig("c", str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    first = fingerprint(source)
    assert fingerprint(source) == first
    (tmp_path / "a.txt").write_text("onetwo")
    second = fingerprint(source)
    (tmp_path / "b.txt").write_text("")
    assert len({first, second, fingerprint(source)}) == 3


def test_the_standard_library_is_found_on_every_machine() -> None:
    assert (Path(expand("${python:stdlib}")) / "argparse.py").is_file()
    assert (Path(expand("${python:packages}/torch")) / "__init__.py").is_file()
    with pytest.raises(DataError, match=r"unknown variable \$\{python:lib\}"):
        expand("${python:lib}/x")
