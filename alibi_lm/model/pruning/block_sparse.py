"""Block-sparse attention: each block of queries and head starts at the key that the bound proves.

`bounds` has the proof. Training plans from q and k alone (`bounds.first_key_per_block`): the plan
is a mask of blocks for FlexAttention (`attention.flex`), or starts for the AMX kernel
(`training_starts`). Activations that are recomputed get the same plan.

Inference (`attend`) reads local keys first, derives from their log-sum-exps where each block must
start, and reads the rest. `BlockSparseAttention` does so on torch's CPU kernel,
`AmxBlockSparseAttention` on the compiled one. No gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from alibi_lm import kernels
from alibi_lm.model.attention.sdpa_cpu import key_bias, merge_part, sdpa_cpu_forward
from alibi_lm.model.pruning.bounds import (
    KeyNormBound,
    QueryBounds,
    first_key_from_logsumexp,
    first_key_per_block,
    lower_logsumexp,
    query_bounds,
)

AMX_MIN_QUERIES = 1024
"""In training the AMX kernel reads shorter sequences densely."""
AMX_TIGHT_BOUND_MIN_QUERIES = 8192
"""Longer ones are worth `first_key_per_block`, which drops more and costs several times as much as
the kernel's own bound."""
AMX_MIN_PRUNED_SHARE = 0.25
"""Starts are used where they drop at least this share of the keys before the blocks."""

CHUNK = 8192
"""Queries that are planned together in inference."""
BLOCK = 128
LOCAL_KEYS = 128
"""Keys before a block that are read before anything is known about the others."""
GROUP_TOLERANCE = 1.25
"""Heads share a call if the longest span is at most this many times the shortest."""
CALL_COST = 1024
"""Cost of a call, in keys of one block; decides how finely runs of blocks are split."""
READ_OFFLOAD_CHUNK = 4096
"""Offloaded keys read at a time."""


def training_starts(
    backend: kernels.Backend, q: Tensor, k: Tensor, slopes: tuple[float, ...], epsilon: float
) -> Tensor | None:
    """The AMX kernel's first key of each block, or None where a dense pass costs no more."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_queries < AMX_MIN_QUERIES or min(slopes) <= 0:
        return None
    if num_queries < AMX_TIGHT_BOUND_MIN_QUERIES:
        starts = backend.first_key_per_block(q, k, slopes, epsilon)
    else:
        exact = torch.tensor(slopes, dtype=torch.float64)
        starts = first_key_per_block(q, k, exact, epsilon, backend.block).int()
    before = torch.arange(num_keys - num_queries, num_keys, backend.block)
    dropped = starts.sum() / (before.sum() * starts.shape[0] * starts.shape[1])
    return starts if float(dropped) >= AMX_MIN_PRUNED_SHARE else None


class KVSource(Protocol):
    """The keys and values of one sequence up to some position, by absolute position."""

    start: int
    """Position of the first resident key."""
    keys: Tensor
    """[KV, n, D], the last dimension contiguous: the resident keys."""
    values: Tensor
    """[KV, n, D], with the strides of `keys`."""
    key_norms: KeyNormBound
    """Of all keys."""

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, stop - first, D] of positions before `start`."""
        ...


@dataclass
class BlockSpans:
    """How far back the blocks of a chunk read."""

    first: list[int]
    """Position of each block's first query."""
    keys: Tensor
    """[H, blocks] int64: keys read before the block's first query."""


def attend(
    q: Tensor, source: KVSource, first: int, slopes: tuple[float, ...], epsilon: float
) -> tuple[Tensor, list[BlockSpans]]:
    """Attention of queries at positions `first` on, the last of the source's.

    For every input the output is within 2 epsilon max|v| of the dense one, beside rounding errors
    like the dense kernel's.

    Args:
        q: [H, n, D].
        source: keys and values up to the last query's; those of the queries and the `LOCAL_KEYS`
            before them are resident.
        first: position of the first query.
        slopes: of the H heads.
        epsilon: the probability that each head and row may drop, above 0 and below 1.

    Returns:
        [H, n, D] in the dtype of q, and how far back the blocks read.
    """
    if q.stride(-1) != 1:
        q = q.contiguous()
    outputs, spans = [], []
    whole = q.shape[1] - q.shape[1] % BLOCK
    for begin, end, rows in ((0, whole, BLOCK), (whole, q.shape[1], q.shape[1] - whole)):
        if begin < end:
            queries = q[:, begin:end]
            serves = rows == BLOCK and amx_unsupported_reason(queries, source) is None
            kind = AmxBlockSparseAttention if serves else BlockSparseAttention
            blocks = kind(queries, source, first + begin, slopes, rows)
            outputs.append(blocks.attend(epsilon))
            spans.append(blocks.spans)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), spans


def amx_unsupported_reason(q: Tensor, source: KVSource) -> str | None:
    """Why `AmxBlockSparseAttention` cannot serve queries [H, n, D] over a source, or None."""
    if q.dtype != torch.bfloat16:
        return f"{q.dtype}"
    backend = kernels.backend()
    if backend is None:
        return kernels.unavailable_reason()
    return backend.attention_unsupported_reason(q[None], source.keys[None], source.values[None])


class BlockSparseAttention:
    """Query blocks of equal size, and what they have read so far: torch's CPU kernel.

    The first call gives every block its own keys and the `LOCAL_KEYS` before them, for all heads
    and blocks at once: blocks are the batch, their keys overlapping views. Its bias is -m(i - j),
    exact at any position, and 16-bit numbers are widened to fp32. Then heads and runs of blocks of
    like span go through the kernel together; parts are merged in fp32 by their log-sum-exp.
    """

    def __init__(
        self, q: Tensor, source: KVSource, first: int, slopes: tuple[float, ...], size: int
    ) -> None:
        self.source, self.slopes, self.size = source, slopes, size
        self.num_heads, length, self.width = q.shape
        self.group = self.num_heads // source.keys.shape[0]
        self.count = length // size
        self.q = q.unflatten(1, (self.count, size))
        """[H, blocks, size, D]."""
        self.distant_dtype = q.dtype if size == BLOCK else torch.float32
        self.output: Tensor
        """[H, blocks, size, D] of what has been read."""
        self.lse: Tensor
        """[H, blocks, size] fp32, its log-sum-exp."""
        begins = first + size * torch.arange(self.count)
        self.begins: list[int] = begins.tolist()
        self.local = (begins - LOCAL_KEYS).clamp(min=0)
        self.positions = begins.unsqueeze(1) + torch.arange(size)

    def attend(self, epsilon: float) -> Tensor:
        """The output [H, n, D]; sets `spans`, how far back the blocks read."""
        farthest = self._read_local()
        key_norms = self.source.key_norms
        rows = query_bounds(self.q.flatten(1, 2), key_norms, self.slopes)
        lower = lower_logsumexp(rows, key_norms, self.lse.flatten(1), farthest, self.width)
        blocked = QueryBounds(
            rows.center_scores.view_as(self.lse),
            rows.norms.view_as(self.lse),
            rows.kv_heads,
            rows.slopes,
        )
        begin = first_key_from_logsumexp(
            blocked, key_norms, lower.view_as(self.lse), self.positions, self.local, epsilon
        )
        self.spans = BlockSpans(self.begins, torch.tensor(self.begins) - begin)
        # Resident keys first; then, for the few blocks that need them, offloaded ones.
        self._read_resident(begin.clamp(min=self.source.start))
        self._read_offloaded(begin)
        return self.output.to(self.q.dtype).flatten(1, 2)

    def _read_local(self) -> int:
        """The blocks' own and local keys; returns the largest distance between two."""
        mask = _local_mask(self.slopes, self.size)
        self.output = self.q.new_empty(self.q.shape, dtype=torch.float32)
        self.lse = self.q.new_empty(self.q.shape[:3], dtype=torch.float32)
        full = next((n for n, begin in enumerate(self.begins) if begin >= LOCAL_KEYS), self.count)
        runs = [(n, n + 1) for n in range(full)]
        if full < self.count:
            runs.append((full, self.count))
        for start, stop in runs:
            first = max(0, self.begins[start] - LOCAL_KEYS)
            length = self.begins[start] + self.size - first
            part = self._call(slice(None), start, stop, first, mask[..., -length:], torch.float32)
            self.output[:, start:stop], self.lse[:, start:stop] = part
        return LOCAL_KEYS + self.size

    def _read_resident(self, begin: Tensor) -> None:
        """Resident keys from `begin` [H, blocks] on."""
        needed = self.local - begin
        for heads in self._head_groups(needed):
            for start, stop, length in self._runs(needed[heads].amax(dim=0).tolist()):
                first = int(self.local[start]) - length
                bias = key_bias(self.slopes, self.begins[start] + self.size - first, torch.float32)
                assert bias is not None
                mask = bias[:, heads, :, :length]
                part = self._call(heads, start, stop, first, mask, self.distant_dtype)
                self._merge(heads, slice(start, stop), *part)

    def _call(
        self, heads: slice, start: int, stop: int, first: int, mask: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """One call of the kernel for blocks `start` to `stop` of some heads.

        The first block reads as many keys from position `first` on as `mask` has; the windows of
        the others follow at steps of a block.

        Returns:
            Output [heads, blocks, size, D] and its log-sum-exp [heads, blocks, size].
        """
        kv = slice(None)
        if heads != slice(None):
            kv = slice(heads.start // self.group, (heads.stop - 1) // self.group + 1)
        keys, values = (
            self._windows(x[kv], stop - start, first, mask.shape[-1], dtype)
            for x in (self.source.keys, self.source.values)
        )
        queries = self.q[heads, start:stop].transpose(0, 1).to(dtype)
        output, lse = sdpa_cpu_forward(queries, keys, values, 0.0, False, attn_mask=mask)
        return output.transpose(0, 1), lse.transpose(0, 1)

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
        """Neighboring heads of like span that have something to read."""
        longest = needed.amax(dim=1).tolist()
        start = 0
        for head in range(1, self.num_heads + 1):
            if head < self.num_heads:
                group = longest[start : head + 1]
                alike = max(group) <= GROUP_TOLERANCE * min(group)
                # A call takes one key head, or as many key heads as query heads.
                shared = start // self.group == head // self.group
                if alike and (self.group == 1 or shared):
                    continue
            if max(longest[start:head]) > 0:
                yield slice(start, head)
            start = head

    def _runs(
        self, needed: list[int], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Runs (start, stop, keys) of blocks that together read what each needs.

        A run is split in two where that saves reading, or where a window would begin before the
        first resident key.
        """
        stop = self.count if stop is None else stop
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

    def _read_offloaded(self, begin: Tensor) -> None:
        """Keys from `begin` [H, blocks] on that are not resident."""
        resident, oldest = self.source.start, int(begin.min())
        if oldest < resident:
            self.output = self.output.float()
        for stop in range(resident, oldest, -READ_OFFLOAD_CHUNK):
            first = max(oldest, stop - READ_OFFLOAD_CHUNK)
            keys, values = self.source.read(first, stop)
            for head, block in (begin < stop).nonzero().tolist():
                last = self.begins[block] + self.size - 1
                kv = head // self.group
                part = sdpa_cpu_forward(
                    self.q[None, head : head + 1, block].to(self.distant_dtype),
                    keys[None, kv : kv + 1].to(self.distant_dtype),
                    values[None, kv : kv + 1].to(self.distant_dtype),
                    0.0,
                    False,
                    attn_mask=distance_bias(self.slopes[head], last - first, last - stop + 1),
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


class AmxBlockSparseAttention(BlockSparseAttention):
    """Whole blocks of bf16 queries on the compiled kernel, which gives each block its own start.

    It goes over the resident keys twice: over the local ones for the log-sum-exps, then over all
    from the starts on. So nothing is grouped, copied side by side or merged.
    """

    def _read_local(self) -> int:
        first = int(self.local[0])
        _, self.lse = self._read(first, self.local.expand(self.num_heads, -1))
        # The kernel starts at multiples of its own block.
        return LOCAL_KEYS + self.size + _backend().block

    def _read_resident(self, begin: Tensor) -> None:
        self.output, self.lse = self._read(self.source.start, begin)

    def _read(self, first: int, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Output [H, blocks, size, D] and log-sum-exp over the keys from `begin` on.

        The kernel is given the keys from `first` on; none before are needed.
        """
        stop = self.begins[-1] + self.size - self.source.start
        keys, values = (
            x[None, :, first - self.source.start : stop]
            for x in (self.source.keys, self.source.values)
        )
        backend = _backend()
        starts = (begin - first).to(torch.int32).repeat_interleave(BLOCK // backend.block, dim=1)
        output, logsumexp = backend.attention_with_logsumexp(
            self.q.flatten(1, 2)[None], keys, values, self.slopes, starts[None]
        )
        shape = (self.count, self.size)
        return output[0].unflatten(1, shape), logsumexp[0].unflatten(1, shape)


def _backend() -> kernels.Backend:
    backend = kernels.backend()
    assert backend is not None
    return backend


def distance_bias(slope: float, farthest: int, nearest: int) -> Tensor:
    """-m d of the distances d from `farthest` down to `nearest`, fp32 [1, 1, 1, n]."""
    distances = torch.arange(farthest, nearest - 1, -1, dtype=torch.float64)
    return (-slope * distances).float().view(1, 1, 1, -1)


@lru_cache(maxsize=8)
def _local_mask(slopes: tuple[float, ...], size: int) -> Tensor:
    """-m(i - j), and -inf for j > i, of a block's rows and its local and own keys, [1, H, ., .]."""
    with torch.inference_mode(False), torch.no_grad():
        distances = torch.arange(size)[:, None] + LOCAL_KEYS - torch.arange(LOCAL_KEYS + size)
        column = torch.tensor(slopes, dtype=torch.float64).view(-1, 1, 1)
        mask = (-column * distances).masked_fill(distances < 0, -math.inf)
        return mask.float().unsqueeze(0)
