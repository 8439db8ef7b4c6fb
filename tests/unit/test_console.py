"""The console's log file on a disk that is full."""

import errno
from pathlib import Path

import pytest

from alibi_lm.console import Console


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
        console.say("a line")
    assert caught.value.errno == errno.ENOSPC
