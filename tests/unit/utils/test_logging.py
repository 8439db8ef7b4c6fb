"""The console where its log has no room, or nobody reads the terminal any more."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from alibi_lm.utils.logging import Console


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_is_told_even_where_the_log_has_no_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    console.log_to(Path("/dev/full"))
    console.error("the disk is full")
    assert capsys.readouterr().err == "error: the disk is full\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_another_line_that_the_log_has_no_room_for_is_an_error() -> None:
    console = Console()
    console.log_to(Path("/dev/full"))
    with pytest.raises(OSError, match="No space") as caught:
        console.info("a line")
    assert caught.value.errno == errno.ENOSPC


def broken() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_a_log_goes_on_where_the_terminal_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console, stream = Console(), broken()
    monkeypatch.setattr(sys, "stdout", stream)
    console.log_to(tmp_path / "train.log")
    console.info("one")
    console.info("two")
    monkeypatch.setattr(sys, "stderr", stream)
    console.error("three")
    console.close()
    stream.close()  # it leads nowhere now, and what it still held is no error
    assert (tmp_path / "train.log").read_text() == "one\ntwo\nerror: three\n"


def test_without_a_log_a_lost_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = broken()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError):
        Console().info("one")
    with pytest.raises(BrokenPipeError):
        stream.close()
