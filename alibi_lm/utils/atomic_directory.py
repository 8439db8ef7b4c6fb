"""Writing a folder completely or not at all."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors import SafetensorError

from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sync


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it on success and removed on an error."""
    _remove_leftovers(out)
    temporary = out.with_name(f".{out.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    created = [parent for parent in (out.parent, *out.parent.parents) if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        os.rename(temporary, out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in created:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise _write_problem(out, error) from error
        raise


def _remove_leftovers(out: Path) -> None:
    """Remove what killed processes on this machine left beside `out`."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.{socket.gethostname()}-*.tmp"):
        owner = path.name.removesuffix(".tmp").rpartition("-")[2]
        if not (owner.isdigit() and psutil.pid_exists(int(owner))):
            shutil.rmtree(path, ignore_errors=True)


def _write_problem(out: Path, error: Exception) -> CheckpointError:
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
    detail = "no space left on the device" if full else " ".join(str(error).split())
    fix = "make room or name another folder; nothing was left behind"
    return CheckpointError(Problem(str(out), None, f"cannot be written ({detail})", fix))
