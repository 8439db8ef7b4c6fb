"""Integer functions that make sampling a function of (seed, index), without tables."""

from __future__ import annotations

import hashlib
import struct

MASK64 = 2**64 - 1
_NUM_ROUNDS = 8


def hash64(*parts: int | str) -> int:
    """64-bit hash of all parts."""
    text = "\x1f".join(str(part) for part in parts)
    return struct.unpack("<Q", hashlib.blake2b(text.encode(), digest_size=8).digest())[0]


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


class Permutation:
    """A permutation of 0 .. size-1 chosen by a key, computed entry by entry in O(1) memory.

    A Feistel network permutes the numbers below the next power of 4; numbers outside the
    range are permuted again until they are inside ("cycle walking", Black and Rogaway
    2002), on average fewer than 4 times.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} numbers")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [hash64("round", key, number) for number in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """The image of `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} of a permutation of {self.size} numbers")
        while True:
            index = self._network(index)
            if index < self.size:
                return index

    def _network(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (mix64(right + key & MASK64) & self._half_mask)
        return left << self._half_bits | right


def floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Sum of floor((step * i + start) / modulus) over 0 <= i < count, for start, step >= 0.

    Euclid-like, O(log modulus) (AtCoder Library, `floor_sum`; Graham, Knuth and Patashnik,
    Concrete Mathematics, section 3.5).
    """
    total = 0
    while count > 0:
        quotient, step = divmod(step, modulus)
        total += quotient * (count * (count - 1) // 2)
        quotient, start = divmod(start, modulus)
        total += quotient * count
        end = step * count + start
        count, start = divmod(end, modulus)
        modulus, step = step, modulus
    return total


def count_below(count: int, modulus: int, step: int, start: int, limit: int) -> int:
    """How many i in [0, count) have (step * i + start) mod modulus < limit.

    For 0 <= limit <= modulus and x = q modulus + r, floor((x - limit) / modulus) is q - 1 where
    r < limit and q elsewhere; so the count is a difference of two floor sums.
    """
    shifted = floor_sum(count, modulus, step, start - limit + modulus)
    return floor_sum(count, modulus, step, start) - (shifted - count)
