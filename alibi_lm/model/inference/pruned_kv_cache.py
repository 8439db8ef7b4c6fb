"""A pruned KV cache: each head keeps a sliding KV cache as long as its certified attention span.

Key heads of similar span share one sliding cache, the keys and values of the last tokens. All keys
and values also go to a KV offload store. A query reads its sliding cache; if the pruning bound
leaves more than epsilon of its probability on older keys, it reads the store, backwards, until the
bound holds. So the guarantee holds for every input, and a sliding cache that is too short costs
only time. If that happens to more than a few queries, the cache grows to what they have read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.model.attention.sdpa_cpu import key_bias, merge_part, sdpa_cpu_forward
from alibi_lm.model.inference.kv_cache import KVCache, LayerKVCache
from alibi_lm.model.inference.kv_offload import KVOffloadStore
from alibi_lm.model.pruning.block_sparse import (
    CHUNK,
    GROUP_TOLERANCE,
    LOCAL_KEYS,
    attend,
    distance_bias,
)
from alibi_lm.model.pruning.bounds import (
    KeyNormBound,
    QueryBounds,
    log_dropped_mass,
    lower_logsumexp,
    query_bounds,
)

MIN_CAPACITY = 256
"""Keys of the shortest sliding cache; capacities are multiples of it."""
MARGIN = 1.1
"""A sliding cache has this many times the keys that were needed."""
REVIEW_INTERVAL = 256
"""Tokens between two checks whether sliding caches are long enough."""
MAX_OFFLOAD_QUERIES = 8
"""Queries of a head that may read the store in that time before its sliding cache grows."""
STORE_OFFLOAD_CHUNK = 1024
"""Keys read from the store at a time."""


@dataclass
class PrunedKVReport:
    """What decoding token by token has read, over all layers and heads."""

    queries: int = 0
    """Queries of single heads."""
    offload_queries: int = 0
    """Queries that needed offloaded keys."""
    offload_keys: int = 0
    """Offloaded keys read."""

    @property
    def offload_share(self) -> float:
        """Share of queries that needed offloaded keys."""
        return self.offload_queries / max(1, self.queries)


@dataclass
class _SlidingKV:
    """Keys and values of the last tokens, of some neighboring key heads."""

    heads: slice
    """Key heads."""
    capacity: int
    """Tokens that queries see."""
    start: int
    """Position of the first key in the buffers."""
    buffers: Tensor
    """[2, KV, capacity + spare, D]: keys and values."""
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
class _RecentKV:
    """A `KVSource`: the last keys and values resident, the others in the store."""

    start: int
    keys: Tensor
    values: Tensor
    key_norms: KeyNormBound
    store: KVOffloadStore

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Offloaded keys and values."""
        return self.store.read(first, stop)


class PrunedKVLayer(LayerKVCache):
    """Keys and values of one block: sliding caches, and the store of all."""

    def __init__(self, epsilon: float, folder: Path | None, report: PrunedKVReport) -> None:
        super().__init__()
        self.epsilon, self.report = epsilon, report
        self.store = KVOffloadStore(folder)
        self.sliding: list[_SlidingKV] = []
        self._spans: list[int] = []
        """For each key head, how many keys its sliding cache must hold."""
        self._longest_span = 0
        """Most keys that the last chunk of several tokens has read."""
        self._key_norms: KeyNormBound | None = None
        self._offload_spans: list[list[int]] = []
        """For each key head, spans of the queries that needed offloaded keys."""
        self._until_review = REVIEW_INTERVAL

    @property
    def resident_kv_bytes(self) -> int:
        """Bytes of the sliding caches."""
        return sum(part.buffers.numel() * part.buffers.element_size() for part in self.sliding)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """Add the next tokens' keys and values, and return their attention over all so far.

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
        if self._key_norms is None:
            self._key_norms = KeyNormBound(keys)
            self._spans = [MIN_CAPACITY] * keys.shape[0]
            self._offload_spans = [[] for _ in self._spans]
        if q.shape[2] == 1:
            return self._token(queries, keys, values, slopes).view(q.shape)
        parts = zip(
            queries.split(CHUNK, 1), keys.split(CHUNK, 1), values.split(CHUNK, 1), strict=True
        )
        outputs = [self._chunk(*part, slopes=slopes) for part in parts]
        return torch.cat(outputs, dim=1).view(q.shape)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on."""
        self.length = length
        self.store.truncate(length)
        self.sliding = []
        if self._key_norms is not None:
            self._key_norms.truncate(length)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """Several tokens: sliding caches are dropped, and sized anew by the spans read here."""
        assert self._key_norms is not None
        first = self.length
        self._append(k, v)
        start = max(0, first - max(LOCAL_KEYS, self._longest_span, *self._spans))
        keys, values = self.store.read(start, self.length)
        if keys.stride() != values.stride():
            keys, values = keys.contiguous(), values.contiguous()
        source = _RecentKV(start, keys, values, self._key_norms, self.store)
        output, spans = attend(q, source, first, slopes, self.epsilon)
        group = q.shape[0] // k.shape[0]
        blocks = torch.cat([part.keys for part in spans], dim=1)
        self._longest_span = int(blocks.max())
        usual = torch.quantile(blocks.double(), 0.95, dim=1, interpolation="higher")
        for head, span in enumerate(usual.view(-1, group).amax(dim=1).tolist()):
            self._spans[head] = max(self._spans[head], int(span))
        self.sliding = []
        return output

    def _token(self, q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """One token: [H, 1, D]."""
        assert self._key_norms is not None
        self._append(k, v)
        for part in self.sliding:
            part.append(k, v)
        if not self.sliding:
            self._fill_sliding()
        output, lse, begins = self._read_sliding(q, slopes)
        rows = query_bounds(q, self._key_norms, slopes)
        self.report.queries += q.shape[0]
        self._read_offloaded(q, rows, output, lse, begins, slopes)
        self._until_review -= 1
        if self._until_review == 0:
            self._review_spans()
        return output.to(q.dtype)

    def _append(self, k: Tensor, v: Tensor) -> None:
        assert self._key_norms is not None
        self._key_norms.add(k)
        self.store.write(k, v)
        self.length += k.shape[1]

    def _fill_sliding(self) -> None:
        """Group neighboring key heads of similar span; fill their caches from the store."""
        sizes = [-(-int(span * MARGIN) // MIN_CAPACITY) * MIN_CAPACITY for span in self._spans]
        start = 0
        for head in range(1, len(sizes) + 1):
            group = sizes[start : head + 1]
            if head < len(sizes) and max(group) <= GROUP_TOLERANCE * min(group):
                continue
            self.sliding.append(self._filled(slice(start, head), max(sizes[start:head])))
            start = head

    def _filled(self, heads: slice, capacity: int) -> _SlidingKV:
        count = min(capacity, self.length)
        keys, values = self.store.read(self.length - count, self.length)
        spare = max(MIN_CAPACITY, capacity // 4)
        shape = (2, heads.stop - heads.start, capacity + spare, keys.shape[2])
        buffers = torch.empty(shape, dtype=keys.dtype)
        buffers[0, :, :count], buffers[1, :, :count] = keys[heads], values[heads]
        return _SlidingKV(heads, capacity, self.length - count, buffers, count)

    def _read_sliding(
        self, q: Tensor, slopes: tuple[float, ...]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Output fp32 [H, 1, D], log-sum-exp [H, 1], and the first position each head has read."""
        group = q.shape[0] // len(self._spans)
        outputs, logsumexps = [], []
        begins: list[int] = []
        longest = max(part.capacity for part in self.sliding)
        table = key_bias(slopes, longest, torch.float32)
        assert table is not None
        for part in self.sliding:
            first, stored = part.view()
            heads = slice(part.heads.start * group, part.heads.stop * group)
            bias = table[:, heads, :, longest - stored.shape[2] :]
            output, lse = sdpa_cpu_forward(
                q[None, heads], stored[:1], stored[1:], 0.0, False, attn_mask=bias
            )
            outputs.append(output[0].float())
            logsumexps.append(lse[0].float())
            begins += [first] * (heads.stop - heads.start)
        return torch.cat(outputs), torch.cat(logsumexps), begins

    def _read_offloaded(
        self,
        q: Tensor,
        rows: QueryBounds,
        output: Tensor,
        lse: Tensor,
        begins: list[int],
        slopes: tuple[float, ...],
    ) -> None:
        """Read backwards, head by head, until every bound holds; changes output, lse and begins."""
        assert self._key_norms is not None
        position = torch.tensor([self.length - 1])
        sliding_begins = list(begins)
        group = q.shape[0] // len(self._spans)
        while True:
            before = torch.tensor(begins)
            span = self.length - min(begins)
            lower = lower_logsumexp(rows, self._key_norms, lse, span, q.shape[-1])
            mass = log_dropped_mass(rows, self._key_norms, lower, position, before)
            # Not `>`: NaN must be read.
            unproven = (~(mass <= math.log(self.epsilon))).nonzero().flatten().tolist()
            if not unproven:
                break
            for head in unproven:
                stop, one, kv = begins[head], slice(head, head + 1), head // group
                if stop == sliding_begins[head] and q.dtype != torch.float32:
                    # Parts that are merged must not be rounded to 16 bits: read again in fp32.
                    keys, values = self._sliding_of(kv)
                    bias = distance_bias(slopes[head], keys.shape[1] - 1, 0)
                    output[one], lse[one] = _read(q[one], keys, values, bias)
                first = begins[head] = max(0, stop - STORE_OFFLOAD_CHUNK)
                keys, values = (x[kv : kv + 1] for x in self.store.read(first, stop))
                bias = distance_bias(slopes[head], self.length - 1 - first, self.length - stop)
                merge_part(output[one], lse[one], *_read(q[one], keys, values, bias))
        for head, (begin, sliding_begin) in enumerate(zip(begins, sliding_begins, strict=True)):
            if begin < sliding_begin:
                self.report.offload_queries += 1
                self.report.offload_keys += sliding_begin - begin
                self._offload_spans[head // group].append(self.length - begin)

    def _sliding_of(self, kv: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, n, D] in a key head's sliding cache."""
        part = next(part for part in self.sliding if part.heads.start <= kv < part.heads.stop)
        keys, values = part.view()[1][:, kv - part.heads.start, None]
        return keys, values

    def _review_spans(self) -> None:
        """Lengthen the sliding caches of heads of which too many queries read the store."""
        self._until_review = REVIEW_INTERVAL
        for head, spans in enumerate(self._offload_spans):
            if len(spans) > MAX_OFFLOAD_QUERIES:
                span = sorted(spans)[-MAX_OFFLOAD_QUERIES]
                self._spans[head] = max(self._spans[head], span)
                self.sliding = []
        self._offload_spans = [[] for _ in self._spans]


def _read(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Output [1, 1, D] of one head's query over keys [1, n, D] in fp32, and log-sum-exp [1, 1]."""
    queries, keys, values = (x[None].float() for x in (q, keys, values))
    output, lse = sdpa_cpu_forward(queries, keys, values, 0.0, False, attn_mask=bias)
    return output[0], lse[0]


class PrunedKVCache(KVCache):
    """The pruned KV caches of all blocks, in order.

    Attributes:
        report: what decoding has read.
    """

    def __init__(
        self,
        num_layers: int,
        epsilon: float,
        folder: Path | None = None,
        report: PrunedKVReport | None = None,
    ) -> None:
        """Keep offloaded keys and values in files of `folder`, or in host memory."""
        self.report = PrunedKVReport() if report is None else report
        self._pruned = [PrunedKVLayer(epsilon, folder, self.report) for _ in range(num_layers)]
        self.layers: Sequence[LayerKVCache] = self._pruned

    @property
    def resident_kv_bytes(self) -> int:
        """Bytes of all sliding caches."""
        return sum(layer.resident_kv_bytes for layer in self._pruned)

    @property
    def offloaded_kv_bytes(self) -> int:
        """Bytes of all offload stores."""
        return sum(layer.store.num_bytes for layer in self._pruned)
