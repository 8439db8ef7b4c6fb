"""Multi-query associative recall (MQAR, arXiv 2312.04927) as text: pairs, then queries.

A prompt states key-value pairs, one a line, each key once; after them keys are asked for again, and
what follows a key is its value. Keys of two capital letters and values of two digits keep pairs
short, as the single tokens of the published task are.
"""

from __future__ import annotations

from itertools import product
from string import ascii_uppercase

PAIR = "\n{key}: {value}"
QUERY = "\n{key}:"
"""A pair up to its value."""
VALUE = " {value}"
END = "\n"
"""After the last pair, before other text."""
KEYS = tuple("".join(letters) for letters in product(ascii_uppercase, repeat=2))
VALUES = tuple(str(number) for number in range(10, 100))
