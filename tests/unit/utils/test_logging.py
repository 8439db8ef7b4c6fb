"""The console where its log has no room, or nobody reads the terminal any more."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pytest

from alibi_lm.utils.logging import Console, console


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_is_printed_even_where_the_log_has_no_room(
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
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["one", "two", "error: three"]


def test_lines_of_the_log_have_their_time_and_a_muted_rank_writes_none(tmp_path: Path) -> None:
    console = Console()
    console.log_to(tmp_path / "train.log")
    before = datetime.now(UTC).replace(microsecond=0)
    console.warning("100% of %s")
    console.muted = True
    console.error("of another rank")
    console.close()
    (line,) = (tmp_path / "train.log").read_text().splitlines()
    moment, text = line.split(" ", 1)
    assert text == "warning: 100% of %s"
    assert before <= datetime.fromisoformat(moment) <= datetime.now(UTC)


def test_a_program_can_add_a_handler_of_its_own() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("alibi_lm").addHandler(handler)
    console.info("a line")
    logging.getLogger("alibi_lm").removeHandler(handler)
    assert [record.getMessage() for record in records] == ["a line"]


def test_words_have_a_color_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for isatty, shown in ((True, "\x1b[31merror:\x1b[0m no\n"), (False, "error: no\n")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda isatty=isatty: isatty)
        monkeypatch.setattr(sys, "stderr", stream)
        console = Console()
        console.colored = True
        console.error("no")
        assert stream.getvalue() == shown


def test_without_a_log_a_lost_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = broken()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError):
        Console().info("one")
    with pytest.raises(BrokenPipeError):
        stream.close()
