"""Token files against the published format, written here byte by byte."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_lm.data.indexed import TokenFile, TokenFileWriter, token_dtype
from alibi_lm.utils.errors import DataError

# Type codes and struct letters of megatron/core/datasets/indexed_dataset.py (class DType).
TYPES = {"uint8": (1, "B"), "int8": (2, "b"), "int16": (3, "h"), "int32": (4, "i"),
         "int64": (5, "q"), "uint16": (8, "H")}  # fmt: skip


def write_by_hand(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], kind: str = "uint16"
) -> None:
    """Documents made of sequences made of tokens, as the format's description has it."""
    code, letter = TYPES[kind]
    item = struct.calcsize("<" + letter)
    tokens, lengths, pointers, ends = b"", b"", b"", struct.pack("<q", 0)
    sequences = 0
    for document in documents:
        for sequence in document:
            pointers += struct.pack("<q", len(tokens))
            lengths += struct.pack("<i", len(sequence))
            tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
            sequences += 1
        ends += struct.pack("<q", sequences)
    assert len(tokens) % item == 0
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    header += struct.pack("<Q", sequences) + struct.pack("<Q", len(documents) + 1)
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(header + lengths + pointers + ends)


DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10]], [[11, 12, 13, 14], [], [15]]]
FLAT = [[5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15]]


@pytest.mark.parametrize("kind", TYPES)
def test_pair_written_by_hand_is_read(tmp_path: Path, kind: str) -> None:
    write_by_hand(tmp_path / "corpus", DOCUMENTS, kind)
    file = TokenFile(tmp_path / "corpus")
    assert (file.num_documents, file.num_sequences, file.num_tokens) == (3, 6, 11)
    assert file.dtype == np.dtype(kind)
    assert file.document_lengths.tolist() == [3, 3, 5]
    assert [file.document(i).tolist() for i in range(3)] == FLAT
    assert file.read(2, 8).tolist() == [7, 8, 9, 10, 11, 12]
    assert file.read(11, 11).tolist() == []


def test_multimodal_modes_behind_the_index_are_allowed(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "corpus", DOCUMENTS)
    with (tmp_path / "corpus.idx").open("ab") as file:
        file.write(bytes(6))
    assert TokenFile(tmp_path / "corpus").document(1).tolist() == [8, 9, 10]


@pytest.mark.parametrize(("vocab_size", "kind"), [(65499, "uint16"), (65500, "int32")])
def test_writer_has_the_same_bytes(tmp_path: Path, vocab_size: int, kind: str) -> None:
    write_by_hand(tmp_path / "hand", [[document] for document in FLAT], kind)
    writer = TokenFileWriter(tmp_path / "ours", token_dtype(vocab_size))
    for document in FLAT:
        writer.add_document(document)
    writer.finish()
    for ending in ("bin", "idx"):
        hand = (tmp_path / f"hand.{ending}").read_bytes()
        assert (tmp_path / f"ours.{ending}").read_bytes() == hand
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hand.bin", "hand.idx", "ours.bin", "ours.idx"]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9), st.data())
def test_writer_goes_on_from_a_flushed_state(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    write_by_hand(folder / "hand", [[document] for document in documents])
    cut = data.draw(st.integers(0, len(documents)))
    writer = TokenFileWriter(folder / "ours", np.uint16)
    for document in documents[:cut]:
        writer.add_document(document)
    state = writer.flush()
    writer.add_document([1, 2, 3])  # lost with the process
    writer.close()
    writer = TokenFileWriter(folder / "ours", np.uint16, state)
    for document in documents[cut:]:
        writer.add_document(document)
    file = writer.finish()
    assert (folder / "ours.bin").read_bytes() == (folder / "hand.bin").read_bytes()
    assert (folder / "ours.idx").read_bytes() == (folder / "hand.idx").read_bytes()
    assert [file.document(i).tolist() for i in range(file.num_documents)] == documents


def test_every_cut_of_the_files_is_refused_by_name(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    for ending in ("bin", "idx"):
        write_by_hand(prefix, DOCUMENTS)
        path = tmp_path / f"corpus.{ending}"
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=f"corpus.{ending}"):
                TokenFile(prefix)
    path = tmp_path / "corpus.bin"
    write_by_hand(prefix, DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="22 bytes expected, 20 bytes found"):
        TokenFile(prefix)


@pytest.mark.parametrize(
    ("at", "raw", "message"),
    [
        (0, b"TNTIDX\x00\x00", "MMIDIDX"),
        (9, struct.pack("<Q", 2), "version 1"),
        (17, b"\x06", "floats"),
        (17, b"\x07", "floats"),
        (17, b"\x63", "type code 99"),
        (34, struct.pack("<i", 4), "running sum"),
        (34, struct.pack("<i", -1), "negative"),
        (34 + 24 + 48, struct.pack("<q", 1), "documents do not cover"),
        (34 + 24 + 48 + 24, struct.pack("<q", 5), "documents do not cover"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, at: int, raw: bytes, message: str) -> None:
    write_by_hand(tmp_path / "corpus", DOCUMENTS)
    path = tmp_path / "corpus.idx"
    content = bytearray(path.read_bytes())
    content[at : at + len(raw)] = raw
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        TokenFile(tmp_path / "corpus")


@pytest.mark.parametrize("ends", [[0], [0, 1, 2]])
def test_an_incomplete_document_index_is_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: list[int]
) -> None:
    write_by_hand(tmp_path / "corpus", [[sequence] for sequence in FLAT])
    path = tmp_path / "corpus.idx"
    content = bytearray(path.read_bytes())
    start = len(content) - 4 * 8
    content[start:] = struct.pack(f"<{len(ends)}q", *ends)
    content[26:34] = struct.pack("<Q", len(ends))
    path.write_bytes(content)
    file = TokenFile(tmp_path / "corpus")
    assert "corpus.idx: its document index is incomplete" in capsys.readouterr().err
    assert [file.document(i).tolist() for i in range(file.num_documents)] == FLAT
    again = pickle.loads(pickle.dumps(file))
    assert again.document_starts.tolist() == [0, 3, 6, 11]
    path.write_bytes(content[:-8] + struct.pack("<q", 5))
    with pytest.raises(DataError, match="documents do not cover"):
        TokenFile(tmp_path / "corpus")


def test_missing_files_and_a_bin_of_another_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="corpus.idx: no such file"):
        TokenFile(tmp_path / "corpus")
    with pytest.raises(DataError, match="a prefix has no ending: give .*/corpus$"):
        TokenFile(tmp_path / "corpus.bin")
    write_by_hand(tmp_path / "corpus", DOCUMENTS)
    (tmp_path / "corpus.bin").write_bytes(bytes(100))
    with pytest.raises(DataError, match="22 bytes expected, 100 bytes found"):
        TokenFile(tmp_path / "corpus")
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match="corpus.bin: no such file"):
        TokenFile(tmp_path / "corpus")


def test_pickle_and_digest(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "corpus", DOCUMENTS)
    file = TokenFile(tmp_path / "corpus")
    again = pickle.loads(pickle.dumps(file))
    assert again.read(0, 11).tolist() == file.read(0, 11).tolist()
    assert again.digest == file.digest
    write_by_hand(tmp_path / "corpus", DOCUMENTS[:2])
    assert TokenFile(tmp_path / "corpus").digest != file.digest


def test_no_documents(tmp_path: Path) -> None:
    file = TokenFileWriter(tmp_path / "corpus", np.uint16).finish()
    assert (file.num_documents, file.num_tokens, file.read(0, 0).tolist()) == (0, 0, [])


def test_the_digest_sees_other_tokens_of_the_same_lengths(tmp_path: Path) -> None:
    digests = set()
    for token in (5, 6):
        writer = TokenFileWriter(tmp_path / str(token), np.uint16)
        writer.add_document([4] * 300_000 + [token] * 300_000)
        writer.finish()
        digests.add(TokenFile(tmp_path / str(token)).digest)
    assert len(digests) == 2
