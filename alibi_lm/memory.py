"""Memory of this process: what Linux counts as resident, and what becomes of freed blocks.

`getrusage` would not do: its peak is kept over exec, so that a process which was started by a
larger one shows that one's peak.
"""

from __future__ import annotations

import ctypes

# Of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def resident_bytes() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Most bytes that were in memory at once."""
    return _status("VmHWM")


def private_bytes() -> int:
    """Bytes in memory now that are not pages of a file."""
    return _status("RssAnon")


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, instead of asking the system for large blocks anew.

    Each new page is zeroed and mapped when it is first touched: a training step that allocates the
    same tensors again and again spends more time on that than on filling them. Where the library
    is not glibc, nothing changes.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
