"""Errors that a user can cause and fix: one line each, exit code 2, no traceback."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 3
EXIT_STOPPED = 4
EXIT_LOST = 5
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One mistake: the key (or file) it is in, its value, the rule it breaks and the fix."""

    key: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_short(self.value)}"
        return " ".join(f"{self.key}{shown}: {self.rule}; {self.fix}".split())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


class UserInterrupt(KeyboardInterrupt):
    """Ctrl-C in work that is partly kept; the line says what is kept and how to resume."""


class UserError(Exception):
    """Base of the errors that a user can fix. Holds every problem found, not only the first."""

    exit_code = EXIT_USER_ERROR
    raised_on_all_ranks = False
    """Whether every rank of the job raises this error."""

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("a user error needs at least one problem")
        self.problems: Sequence[Problem] = problems
        super().__init__(" | ".join(str(problem) for problem in problems))


# Errors about a path that the user named, or a full disk.
_PATH_ERRORS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
    errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EINVAL,
})  # fmt: skip


def path_error(error: OSError) -> UserError | None:
    """The user error for an error of the file system, or None if the user cannot fix it."""
    if error.errno not in _PATH_ERRORS:
        return None
    where = str(error.filename or "the output")
    rule = f"cannot be used ({error.strerror})"
    return CheckpointError(Problem(where, None, rule, "make room, or name another path"))


class ConfigError(UserError):
    """A config, recipe, suite or command line that breaks a rule."""


class DataError(UserError):
    """A corpus, tokenizer or token file that cannot be used."""


class CheckpointError(UserError):
    """A run folder, checkpoint or exported folder that cannot be used."""


class NotFiniteError(UserError):
    """Training produced a loss or gradient that is not finite; the run stops."""

    exit_code = EXIT_NOT_FINITE
