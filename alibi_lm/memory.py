"""Resident memory of this process, as Linux counts it.

`getrusage` would not do: its peak is kept over exec, so that a process which was started by a
larger one shows that one's peak.
"""

from __future__ import annotations


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
