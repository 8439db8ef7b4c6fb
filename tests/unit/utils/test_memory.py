"""What training asks of the C library and of the kernel, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
import torch
from alibi_lm.utils import memory

def huge():
    size = here = 0
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            here = line.rstrip().endswith("[heap]")
        elif here and line.startswith("AnonHugePages:"):
            size += int(line.split()[1])
    return size >> 10

memory.GROWTH = 64 << 20
{before}
memory.keep_freed_memory()
tensor = torch.ones(50 << 18)  # fits into what the heap has grown by
print(huge())
larger = torch.ones(300 << 18)  # does not: it lies in small pages until the next call
memory.use_huge_pages()
print(huge())
start = memory.resident_bytes()
del larger
print((start - memory.resident_bytes()) >> 20)
assert tensor.sum() == tensor.numel()
"""


def run(before: str) -> list[int]:
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(line) for line in result.stdout.split()]


@pytest.mark.skipif(
    not TRANSPARENT.exists() or "[never]" in TRANSPARENT.read_text(),
    reason="the kernel gives no transparent huge pages",
)
def test_the_heap_lies_in_huge_pages_and_keeps_what_is_freed() -> None:
    """In MiB; the kernel need not find a huge page for every address, but for most it does."""
    first, second, given_back = run("")
    assert first >= 40
    assert second >= first + 200
    assert given_back <= 1


def test_huge_pages_that_are_switched_off_stay_off(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always madvise [never]\n")
    switched_off = f"import pathlib; memory._TRANSPARENT = pathlib.Path({str(path)!r})"
    if TRANSPARENT.exists() and "[always]" in TRANSPARENT.read_text():
        pytest.skip("the kernel gives them to everybody")
    assert run(switched_off)[:2] == [0, 0]
