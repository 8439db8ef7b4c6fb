"""Query blocks that read as far as `horizon` proves necessary, in few calls of a fused kernel.

A first call of torch's kernel gives every block its own keys and the `LOCAL_KEYS` before them, for
all heads and blocks at once: blocks are the batch, their keys overlapping views. The bias is
-m(i - j) there, exact at any position, and 16-bit numbers are widened to fp32. The log-sum-exps
then prove for each block and head where it must start to read. Heads that reach alike, and runs of
blocks that do, go through the kernel together for what is left; parts are merged by their
log-sum-exp, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from alibi_lm.model.attention.sdpa_cpu import key_bias, merge_part, sdpa_cpu_forward
from alibi_lm.model.pruning.bounds import KeyNormBound, Rows, lower_logsumexp, query_rows, starts

BLOCK = 128
LOCAL_KEYS = 128
GROUP_TOLERANCE = 1.25
"""Heads go together where the longest reach is at most this many times the shortest."""
CALL_COST = 1024
"""What a call costs, as keys of one block; decides how finely runs of blocks are cut."""
OFFLOAD_CHUNK = 4096
"""Keys read at a time that are not at hand."""


class KVSource(Protocol):
    """The keys and values of one sequence up to some position, by absolute position."""

    start: int
    """Position of the first key of `keys`."""
    keys: Tensor
    """[KV, n, D], the last dimension contiguous: what is at hand."""
    values: Tensor
    """[KV, n, D], with the strides of `keys`."""
    ball: KeyNormBound
    """Of all keys."""

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, stop - first, D] of positions before `start`."""
        ...


@dataclass
class BlockSpans:
    """How far the blocks of a chunk read."""

    first: list[int]
    """Position of each block's first query."""
    keys: Tensor
    """[H, blocks] int64: keys read before the block's first query."""


class BlockSparseAttention:
    """Query blocks of equal size, and what they have read so far."""

    def __init__(
        self, q: Tensor, source: KVSource, first: int, slopes: tuple[float, ...], size: int
    ) -> None:
        self.source, self.slopes, self.size = source, slopes, size
        self.num_heads, length, self.width = q.shape
        self.group = self.num_heads // source.keys.shape[0]
        self.count = length // size
        self.q = q.unflatten(1, (self.count, size))
        """[H, blocks, size, D]."""
        self.far_dtype = q.dtype if size == BLOCK else torch.float32
        self.output: Tensor
        """[H, blocks, size, D] of what has been read."""
        self.lse: Tensor
        """[H, blocks, size] fp32, its log-sum-exp."""
        begins = first + size * torch.arange(self.count)
        self.begins: list[int] = begins.tolist()
        self.near = (begins - LOCAL_KEYS).clamp(min=0)
        self.positions = begins.unsqueeze(1) + torch.arange(size)

    def attend(self, epsilon: float) -> Tensor:
        """The output [H, n, D]; afterwards `reach` says how far the blocks have read."""
        span = self._read_near()
        rows = query_rows(self.q.flatten(1, 2), self.source.ball, self.slopes)
        lower = lower_logsumexp(
            rows, self.source.ball, self.lse.flatten(1), span, self.width
        ).view_as(self.lse)
        shaped = Rows(
            rows.towards.view_as(self.lse), rows.norm.view_as(self.lse), rows.heads, rows.slopes
        )
        begin = starts(shaped, self.source.ball, lower, self.positions, self.near, epsilon)
        self.reach = BlockSpans(self.begins, torch.tensor(self.begins) - begin)
        # What is at hand first; then, for the few blocks that need it, what is not.
        self._read_on(begin.clamp(min=self.source.start))
        self._read_older(begin)
        return self.output.to(self.q.dtype).flatten(1, 2)

    def _read_near(self) -> int:
        """The blocks' own and local keys; returns the largest distance between two."""
        mask = _near_mask(self.slopes, self.size)
        self.output = self.q.new_empty(self.q.shape, dtype=torch.float32)
        self.lse = self.q.new_empty(self.q.shape[:3], dtype=torch.float32)
        full = next((n for n, begin in enumerate(self.begins) if begin >= LOCAL_KEYS), self.count)
        runs = [(n, n + 1) for n in range(full)]
        if full < self.count:
            runs.append((full, self.count))
        for start, stop in runs:
            first = max(0, self.begins[start] - LOCAL_KEYS)
            length = self.begins[start] + self.size - first
            keys, values = (
                self._windows(x, stop - start, first, length, torch.float32)
                for x in (self.source.keys, self.source.values)
            )
            queries = self.q[:, start:stop].transpose(0, 1).float()
            part = sdpa_cpu_forward(
                queries, keys, values, 0.0, False, attn_mask=mask[..., -length:]
            )
            self.output[:, start:stop] = part[0].transpose(0, 1)
            self.lse[:, start:stop] = part[1].transpose(0, 1)
        return LOCAL_KEYS + self.size

    def _read_on(self, begin: Tensor) -> None:
        """What is at hand from `begin` [H, blocks] on."""
        needed = self.near - begin
        for heads in self._head_groups(needed):
            for run in self._runs(needed[heads].amax(dim=0).tolist(), 0, self.count):
                self._read_far(heads, *run)

    def _windows(
        self, x: Tensor, count: int, first: int, length: int, dtype: torch.dtype
    ) -> Tensor:
        """[count, KV, length, D], overlapping: from position `first` on, each a block further."""
        start = first - self.source.start
        x = x[:, start : start + length + (count - 1) * self.size].to(dtype)
        return x.as_strided(
            (count, x.shape[0], length, x.shape[2]),
            (self.size * x.stride(1), x.stride(0), x.stride(1), x.stride(2)),
            x.storage_offset(),
        )

    def _head_groups(self, needed: Tensor) -> Iterator[slice]:
        """Neighboring heads of like reach that have something to read."""
        longest = needed.amax(dim=1).tolist()
        start = 0
        for head in range(1, self.num_heads + 1):
            if head < self.num_heads:
                reaches = longest[start : head + 1]
                alike = max(reaches) <= GROUP_TOLERANCE * min(reaches)
                # A call takes one key head, or as many key heads as query heads.
                shared = start // self.group == head // self.group
                if alike and (self.group == 1 or shared):
                    continue
            if max(longest[start:head]) > 0:
                yield slice(start, head)
            start = head

    def _runs(self, needed: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Runs (start, stop, keys) of blocks that together read what each needs.

        A run is cut in two where that saves reading, or where a window would begin before the
        first key at hand.
        """
        longest = max(needed[start:stop])
        if longest == 0:
            return
        if stop - start == 1:
            yield start, stop, longest
            return
        middle = (start + stop) // 2
        inside = self.begins[start] - LOCAL_KEYS - longest >= self.source.start
        halves = sum(
            CALL_COST + (b - a) * max(needed[a:b]) for a, b in ((start, middle), (middle, stop))
        )
        if inside and CALL_COST + (stop - start) * longest <= halves:
            yield start, stop, longest
            return
        yield from self._runs(needed, start, middle)
        yield from self._runs(needed, middle, stop)

    def _read_far(self, heads: slice, start: int, stop: int, length: int) -> None:
        """Give a run of blocks the `length` keys before those near to them."""
        first = int(self.near[start]) - length
        kv = slice(heads.start // self.group, (heads.stop - 1) // self.group + 1)
        keys, values = (
            self._windows(x[kv], stop - start, first, length, self.far_dtype)
            for x in (self.source.keys, self.source.values)
        )
        bias = key_bias(self.slopes, self.begins[start] + self.size - first, torch.float32)
        assert bias is not None
        queries = self.q[heads, start:stop].transpose(0, 1).to(self.far_dtype)
        part = sdpa_cpu_forward(
            queries, keys, values, 0.0, False, attn_mask=bias[:, heads, :, :length]
        )
        self._merge(heads, slice(start, stop), part[0].transpose(0, 1), part[1].transpose(0, 1))

    def _read_older(self, begin: Tensor) -> None:
        """Give blocks the keys that they need and that are not at hand."""
        hand, oldest = self.source.start, int(begin.min())
        if oldest < hand:
            self.output = self.output.float()
        for stop in range(hand, oldest, -OFFLOAD_CHUNK):
            first = max(oldest, stop - OFFLOAD_CHUNK)
            wanting = (begin < stop).nonzero().tolist()
            keys, values = self.source.read(first, stop)
            for head, block in wanting:
                last = self.begins[block] + self.size - 1
                bias = distance_bias(self.slopes[head], last - first, last - stop + 1)
                kv = head // self.group
                part = sdpa_cpu_forward(
                    self.q[None, head : head + 1, block].to(self.far_dtype),
                    keys[None, kv : kv + 1].to(self.far_dtype),
                    values[None, kv : kv + 1].to(self.far_dtype),
                    0.0,
                    False,
                    attn_mask=bias,
                )
                self._merge(slice(head, head + 1), slice(block, block + 1), *part)

    def _merge(self, heads: slice, blocks: slice, output: Tensor, lse: Tensor) -> None:
        """Add a part [heads, blocks, size, D] and its log-sum-exp to what has been read.

        Its bias has its zero at the block's last row, not at each row.
        """
        to_last = torch.arange(self.size - 1, -1, -1)
        slopes = torch.tensor(self.slopes[heads], dtype=torch.float64)
        lse = lse + (slopes.view(-1, 1, 1) * to_last).float()
        merge_part(self.output[heads, blocks], self.lse[heads, blocks], output, lse)


def distance_bias(slope: float, farthest: int, nearest: int) -> Tensor:
    """-m d of the distances d from `farthest` down to `nearest`, fp32 [1, 1, 1, n]."""
    distances = torch.arange(farthest, nearest - 1, -1, dtype=torch.float64)
    return (-slope * distances).float().view(1, 1, 1, -1)


@lru_cache(maxsize=8)
def _near_mask(slopes: tuple[float, ...], size: int) -> Tensor:
    """-m(i - j), and -inf for j > i, of a block's rows and its local and own keys, [1, H, ., .]."""
    with torch.inference_mode(False), torch.no_grad():
        distances = torch.arange(size)[:, None] + LOCAL_KEYS - torch.arange(LOCAL_KEYS + size)
        steepness = torch.tensor(slopes, dtype=torch.float64).view(-1, 1, 1)
        mask = (-steepness * distances).masked_fill(distances < 0, -math.inf)
        return mask.float().unsqueeze(0)
