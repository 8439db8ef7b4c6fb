"""Decoding with a bounded cache: each head keeps as many keys as its horizon proves it needs.

A layer's key heads are put into groups of like reach. Each group has a ring: the keys and values of
its last so many tokens. All keys and values also go to a cold store. A query reads its group's
ring; if its own bound (`horizon`) leaves more than epsilon of its probability on keys before the
ring, it reads from the cold store, backwards, until the bound holds. So the guarantee is for every
input, and a ring that is too short costs time only. Rings are made longer where that happens to
more than a few queries, by what those queries have read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.model.attention.sdpa_cpu import key_bias, merge_part, sdpa_cpu_forward
from alibi_lm.model.inference.kv_cache import KVCache, LayerKVCache
from alibi_lm.model.inference.kv_offload import KVOffloadStore
from alibi_lm.model.pruning.block_sparse import GROUP_TOLERANCE, LOCAL_KEYS, distance_bias
from alibi_lm.model.pruning.bounds import (
    KeyNormBound,
    Rows,
    log_far_mass,
    lower_logsumexp,
    query_rows,
)
from alibi_lm.model.pruning.pruned_attention import CHUNK, attend

SMALLEST = 256
"""Keys of the shortest ring; rings are multiples of it."""
MARGIN = 1.1
"""A ring has this many times the keys that were needed."""
REVIEW = 256
"""Tokens between two looks at whether rings are long enough."""
TOO_MANY = 8
"""Queries of a head in that time that may read the cold store before its ring is made longer."""
OFFLOAD_CHUNK = 1024
"""Keys read from the cold store at a time."""


@dataclass
class PrunedKVReport:
    """What decoding token by token has read, over all layers and heads."""

    queries: int = 0
    """Queries of single heads."""
    offload_queries: int = 0
    """Of those, how many read the cold store."""
    offload_keys: int = 0
    """Keys read there."""

    @property
    def offload_share(self) -> float:
        """Share of queries that read the cold store."""
        return self.offload_queries / max(1, self.queries)


@dataclass
class _SlidingBuffer:
    """The last tokens of some neighboring key heads."""

    heads: slice
    """Key heads."""
    capacity: int
    start: int
    """Position of the first key in the buffers."""
    buffers: Tensor
    """[2, KV, capacity + room, D]: keys and values."""
    count: int
    """Tokens in the buffers."""

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add one token's keys and values [KV, 1, D]."""
        if self.count == self.buffers.shape[2]:
            kept = self.capacity - 1
            self.buffers[:, :, :kept] = self.buffers[:, :, self.count - kept :].clone()
            self.start += self.count - kept
            self.count = kept
        self.buffers[0, :, self.count : self.count + 1] = keys[self.heads]
        self.buffers[1, :, self.count : self.count + 1] = values[self.heads]
        self.count += 1

    def view(self) -> tuple[int, Tensor]:
        """The position of the first key, and keys and values [2, KV, n, D]."""
        first = max(0, self.count - self.capacity)
        return self.start + first, self.buffers[:, :, first : self.count]


@dataclass
class _Tail:
    """The last keys and values, contiguous, and the others in the cold store: a `KVSource`."""

    start: int
    keys: Tensor
    values: Tensor
    ball: KeyNormBound
    cold: KVOffloadStore

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of older positions."""
        return self.cold.read(first, stop)


class PrunedKVLayer(LayerKVCache):
    """Keys and values of one block: rings, and the cold store behind them."""

    def __init__(self, epsilon: float, folder: Path | None, report: PrunedKVReport) -> None:
        super().__init__()
        self.epsilon, self.report = epsilon, report
        self.cold = KVOffloadStore(folder)
        self.rings: list[_SlidingBuffer] = []
        self.needs: list[int] = []
        """Of each key head, how many keys its ring must have."""
        self._reached = 0
        """How far the tokens that last came together have read at most."""
        self._ball: KeyNormBound | None = None
        self._seen: list[list[int]] = []
        self._until_review = REVIEW

    @property
    def resident_kv_bytes(self) -> int:
        """Bytes of the rings."""
        return sum(ring.buffers.numel() * ring.buffers.element_size() for ring in self.rings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """Add the next tokens' keys and values, and give their attention over all so far.

        Args:
            q: [B, H, n, D].
            k, v: [B, KV, n, D].
            slopes: of the H heads.

        Returns:
            [B, H, n, D].

        Raises:
            ValueError: a gradient is wanted through the cache.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad or q.requires_grad):
            raise ValueError("a cache carries no gradient: decode under torch.no_grad()")
        # Sequences of a batch are further heads.
        slopes = slopes * q.shape[0]
        queries, keys, values = (x.flatten(0, 1) for x in (q, k, v))
        if self._ball is None:
            self._ball = KeyNormBound(keys)
            self.needs = [SMALLEST] * keys.shape[0]
            self._seen = [[] for _ in self.needs]
        if q.shape[2] == 1:
            return self._token(queries, keys, values, slopes).view(q.shape)
        parts = zip(
            queries.split(CHUNK, 1), keys.split(CHUNK, 1), values.split(CHUNK, 1), strict=True
        )
        outputs = [self._several(*part, slopes=slopes) for part in parts]
        return torch.cat(outputs, dim=1).view(q.shape)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = length
        self.cold.truncate(length)
        self.rings = []
        if self._ball is not None:
            self._ball.truncate(length)

    def _several(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """Several tokens: rings are left, and planned anew from how far they have read."""
        assert self._ball is not None
        first = self.length
        self._store(k, v)
        start = max(0, first - max(LOCAL_KEYS, self._reached, *self.needs))
        keys, values = self.cold.read(start, self.length)
        if keys.stride() != values.stride():
            keys, values = keys.contiguous(), values.contiguous()
        source = _Tail(start, keys, values, self._ball, self.cold)
        output, reaches = attend(q, source, first, slopes, self.epsilon)
        group = q.shape[0] // k.shape[0]
        blocks = torch.cat([reach.keys for reach in reaches], dim=1)
        self._reached = int(blocks.max())
        usual = torch.quantile(blocks.double(), 0.95, dim=1, interpolation="higher")
        for head, need in enumerate(usual.view(-1, group).amax(dim=1).tolist()):
            self.needs[head] = max(self.needs[head], int(need))
        self.rings = []
        return output

    def _token(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """One token: [H, 1, D]."""
        assert self._ball is not None
        self._store(k, v)
        for ring in self.rings:
            ring.append(k, v)
        if not self.rings:
            self._make_rings()
        output, lse, begins = self._read_rings(q, slopes)
        rows = query_rows(q, self._ball, slopes)
        self.report.queries += q.shape[0]
        self._read_cold(q, rows, output, lse, begins, slopes)
        self._until_review -= 1
        if self._until_review == 0:
            self._review()
        return output.to(q.dtype)

    def _store(self, k: Tensor, v: Tensor) -> None:
        assert self._ball is not None
        self._ball.add(k)
        self.cold.write(k, v)
        self.length += k.shape[1]

    def _make_rings(self) -> None:
        """Group neighboring key heads of like needs, and fill their rings from the cold store."""
        sizes = [-(-int(need * MARGIN) // SMALLEST) * SMALLEST for need in self.needs]
        start = 0
        for head in range(1, len(sizes) + 1):
            group = sizes[start : head + 1]
            if head < len(sizes) and max(group) <= GROUP_TOLERANCE * min(group):
                continue
            self.rings.append(self._ring(slice(start, head), max(sizes[start:head])))
            start = head

    def _ring(self, heads: slice, capacity: int) -> _SlidingBuffer:
        count = min(capacity, self.length)
        keys, values = self.cold.read(self.length - count, self.length)
        room = max(SMALLEST, capacity // 4)
        shape = (2, heads.stop - heads.start, capacity + room, keys.shape[2])
        buffers = torch.empty(shape, dtype=keys.dtype)
        buffers[0, :, :count], buffers[1, :, :count] = keys[heads], values[heads]
        return _SlidingBuffer(heads, capacity, self.length - count, buffers, count)

    def _read_rings(self, q: Tensor, slopes: tuple[float, ...]) -> tuple[Tensor, Tensor, list[int]]:
        """Output fp32 [H, 1, D], log-sum-exp [H, 1], and the first position each head has read."""
        group = q.shape[0] // len(self.needs)
        outputs, logsumexps = [], []
        begins: list[int] = []
        longest = max(ring.capacity for ring in self.rings)
        table = key_bias(slopes, longest, torch.float32)
        assert table is not None
        for ring in self.rings:
            first, stored = ring.view()
            heads = slice(ring.heads.start * group, ring.heads.stop * group)
            bias = table[:, heads, :, longest - stored.shape[2] :]
            part = sdpa_cpu_forward(
                q[None, heads], stored[:1], stored[1:], 0.0, False, attn_mask=bias
            )
            outputs.append(part[0][0].float())
            logsumexps.append(part[1][0].float())
            begins += [first] * (heads.stop - heads.start)
        return torch.cat(outputs), torch.cat(logsumexps), begins

    def _read_cold(
        self,
        q: Tensor,
        rows: Rows,
        output: Tensor,
        lse: Tensor,
        begins: list[int],
        slopes: tuple[float, ...],
    ) -> None:
        """Read backwards, head by head, until every bound holds; changes output and lse."""
        assert self._ball is not None
        position = torch.tensor([self.length - 1])
        ring_begins = list(begins)
        while True:
            before = torch.tensor(begins)
            span = self.length - min(begins)
            lower = lower_logsumexp(rows, self._ball, lse, span, q.shape[-1])
            mass = log_far_mass(rows, self._ball, lower, position, before)
            # Not <=: what is not a number must be read.
            wanting = (~(mass <= math.log(self.epsilon))).nonzero().flatten().tolist()
            if not wanting:
                break
            for head in wanting:
                if begins[head] == ring_begins[head]:
                    self._widen(q, head, output, lse, slopes)
                self._read_piece(q, head, begins, output, lse, slopes)
        group = q.shape[0] // len(self.needs)
        for head, (begin, ring_begin) in enumerate(zip(begins, ring_begins, strict=True)):
            if begin < ring_begin:
                self.report.offload_queries += 1
                self.report.offload_keys += ring_begin - begin
                self._seen[head // group].append(self.length - begin)

    def _widen(
        self, q: Tensor, head: int, output: Tensor, lse: Tensor, slopes: tuple[float, ...]
    ) -> None:
        """Read a head's ring again in fp32: what is merged must not be rounded to 16 bits."""
        if q.dtype == torch.float32:
            return
        kv = head // (q.shape[0] // len(self.needs))
        ring = next(r for r in self.rings if r.heads.start <= kv < r.heads.stop)
        stored = ring.view()[1][:, None, kv - ring.heads.start, None].float()
        bias = distance_bias(slopes[head], stored.shape[3] - 1, 0)
        query = q[None, head : head + 1].float()
        part = sdpa_cpu_forward(query, stored[0], stored[1], 0.0, False, attn_mask=bias)
        output[head], lse[head] = part[0][0, 0], part[1][0, 0]

    def _read_piece(
        self,
        q: Tensor,
        head: int,
        begins: list[int],
        output: Tensor,
        lse: Tensor,
        slopes: tuple[float, ...],
    ) -> None:
        stop = begins[head]
        first = max(0, stop - OFFLOAD_CHUNK)
        kv = head // (q.shape[0] // len(self.needs))
        keys, values = self.cold.read(first, stop)
        bias = distance_bias(slopes[head], self.length - 1 - first, self.length - stop)
        part, part_lse = sdpa_cpu_forward(
            q[None, head : head + 1].float(),
            keys[None, kv : kv + 1].float(),
            values[None, kv : kv + 1].float(),
            0.0,
            False,
            attn_mask=bias,
        )
        own = slice(head, head + 1)
        merge_part(output[own], lse[own], part[0], part_lse[0])
        begins[head] = first

    def _review(self) -> None:
        """Longer rings for heads of which too many queries were not content with theirs."""
        self._until_review = REVIEW
        for head, reaches in enumerate(self._seen):
            if len(reaches) > TOO_MANY:
                reach = sorted(reaches)[-TOO_MANY]
                self.needs[head] = max(self.needs[head], reach)
                self.rings = []
        self._seen = [[] for _ in self.needs]


@dataclass
class PrunedKVCache(KVCache):
    """The rings of all blocks, in order.

    Attributes:
        report: what decoding has read.
    """

    num_layers: int
    epsilon: float
    folder: Path | None = None
    """Where cold keys and values lie; by default in host memory."""
    report: PrunedKVReport = field(default_factory=PrunedKVReport)

    def __post_init__(self) -> None:
        self.rings = [
            PrunedKVLayer(self.epsilon, self.folder, self.report) for _ in range(self.num_layers)
        ]
        self.layers: Sequence[LayerKVCache] = self.rings

    @property
    def resident_kv_bytes(self) -> int:
        """Bytes of all rings."""
        return sum(layer.resident_kv_bytes for layer in self.rings)

    @property
    def offloaded_kv_bytes(self) -> int:
        """Bytes of all cold stores."""
        return sum(layer.cold.num_bytes for layer in self.rings)
