"""The console where nobody reads the terminal any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from alibi_lm.console import Console


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
    console.say("one")
    console.say("two")
    console.close()
    stream.close()  # it leads nowhere now, and what it still held is no error
    assert (tmp_path / "train.log").read_text() == "one\ntwo\n"


def test_without_a_log_a_lost_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = broken()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError):
        Console().say("one")
    with pytest.raises(BrokenPipeError):
        stream.close()
