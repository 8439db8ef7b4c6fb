"""UTF-8 for paths and arguments, whatever the locale."""

from __future__ import annotations

import os
import sys


def ensure_utf8() -> None:
    """Restart the interpreter in UTF-8 mode if the locale has another encoding.

    In such a locale Python cannot name a file of a UTF-8 config or recipe, and reads typed text
    as half characters. Processes that this one starts inherit the mode.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
