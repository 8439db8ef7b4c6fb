"""Memory of this process: resident bytes, reuse of freed blocks, huge pages.

The figures come from /proc/self/status, so that they can be compared: psutil gives no peak, and the
peak of `getrusage` survives exec, so a process started by a larger one shows that one's.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

# Of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
# Of sys/mman.h.
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25

HUGE_PAGE = 2 << 20
GROWTH = 1 << 30
"""Address space that the heap grows by at once; unused pages take no memory."""
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident_bytes() -> int:
    """Resident bytes now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Peak of the resident bytes."""
    return _status("VmHWM")


def private_bytes() -> int:
    """Resident bytes now that are not pages of a file."""
    return _status("RssAnon")


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks instead of returning large ones to the system.

    Each new page is zeroed and mapped when it is first touched: a training step that allocates the
    same tensors again and again spends more time on that than on filling them. Where the library
    is not glibc, nothing changes.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    library.mallopt(_M_TOP_PAD, GROWTH)
    # A block that does not fit makes the heap grow, while nothing of that is in use yet.
    library.free(library.malloc(GROWTH))
    use_huge_pages()


def use_huge_pages() -> None:
    """Put what the heap has grown since the last call into huge pages.

    Products and copies of large tensors are a tenth faster in them. Nothing is done where the C
    library is not glibc, or where the system has its transparent huge pages set to "never"; what
    the kernel cannot do stays as it is.
    """
    library = _glibc()
    if library is None or library.sbrk(0) - _covered.get("heap", 0) < HUGE_PAGE:
        return  # called every step: where nothing has grown there is nothing to read
    if not _TRANSPARENT.exists() or "[never]" in _TRANSPARENT.read_text():
        return
    start, end = _covered.get("heap") or _heap_start(), library.sbrk(0)
    start, end = (address // HUGE_PAGE * HUGE_PAGE for address in (start + HUGE_PAGE - 1, end))
    library.madvise(start, end - start, _MADV_HUGEPAGE)
    if _covered:  # what has been used by now lies in small pages
        library.madvise(start, end - start, _MADV_COLLAPSE)
    _covered["heap"] = end


_covered: dict[str, int] = {}
"""End of the part of the heap that is in huge pages."""


def _heap_start() -> int:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        line = next(line for line in file if line.rstrip().endswith("[heap]"))
    return int(line.split("-")[0], 16)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
