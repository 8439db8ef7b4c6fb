"""An exclusive lock on a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alibi_lm.utils.errors import Problem, UserError
from alibi_lm.utils.logging import console


@contextmanager
def exclusive_lock(folder: Path, error: type[UserError]) -> Iterator[None]:
    """Lock a folder, created if needed; the lock ends with the process, however that ends.

    Raises:
        UserError: of the given type, if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or end it"
            problem = Problem(str(folder), None, "is in use by another process", fix)
            raise error(problem) from None
        except OSError:
            console.warning(
                f"{folder} is on storage without locks: do not start a second process on it"
            )
        yield
    finally:
        os.close(descriptor)
