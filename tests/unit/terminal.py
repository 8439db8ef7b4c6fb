"""The command run on a terminal, and what it showed there."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
import termios

COMMAND = [sys.executable, "-m", "alibi_lm"]


def on_terminal(arguments: list[str], **variables: str) -> tuple[int, str]:
    """Exit code of `alibi-lm` and all that it wrote, its output and errors a terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm"} | variables
    process = subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=slave,
                               stderr=slave, env=environment)  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError as end:  # of a terminal that nobody writes to any more
        if end.errno != errno.EIO:
            raise
    os.close(master)
    return process.wait(), shown.decode().replace("\r\n", "\n")
