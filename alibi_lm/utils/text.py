"""Words for messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
