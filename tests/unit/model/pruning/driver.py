"""Pruned attention over a whole sequence that is in memory, as `long_scoring` drives it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from alibi_lm.model.pruning.block_sparse import (
    BLOCK,
    CHUNK,
    BlockSpans,
    amx_unsupported_reason,
    attend,
)
from alibi_lm.model.pruning.bounds import KeyNormBound

WIDE_UP_TO = 4096
"""torch's kernel is given sequences of at most so many 16-bit keys in fp32: with few parts to merge
the dense path rounds less than a merged part does."""


@dataclass
class TailKV:
    """A `KVSource`: keys and values from `start` on are resident, earlier ones are read."""

    start: int
    all_keys: Tensor
    all_values: Tensor
    key_norms: KeyNormBound
    read_ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys, self.values = self.all_keys[:, self.start :], self.all_values[:, self.start :]

    def read(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        assert first < stop <= self.start
        self.read_ranges.append((first, stop))
        return self.all_keys[:, first:stop], self.all_values[:, first:stop]


def pruned_sequence(
    q: Tensor, k: Tensor, v: Tensor, slopes: tuple[float, ...], epsilon: float
) -> tuple[Tensor, list[BlockSpans]]:
    """`attend` over one sequence, chunk by chunk; too few keys to prune are read all the same.

    Args:
        q: [H, Tq, D] of the last Tq positions.
        k, v: [KV, Tk, D].
        slopes: of the H heads.
        epsilon: what each row may drop.
    """
    dtype, offset = q.dtype, k.shape[1] - q.shape[1]
    whole = q[:, : q.shape[1] - q.shape[1] % BLOCK]
    narrow = TailKV(0, k, v, KeyNormBound(k))
    if k.shape[1] <= WIDE_UP_TO and amx_unsupported_reason(whole, narrow) is not None:
        q, k, v = q.float(), k.float(), v.float()
    k, v = k.contiguous(), v.contiguous()
    key_norms = KeyNormBound(k[:, :CHUNK])
    key_norms.add(k[:, :offset])
    outputs, spans = [], []
    for first in range(0, q.shape[1], CHUNK):
        stop = min(first + CHUNK, q.shape[1])
        key_norms.add(k[:, offset + first : offset + stop])
        source = TailKV(0, k[:, : offset + stop], v[:, : offset + stop], key_norms)
        output, read = attend(q[:, first:stop], source, offset + first, slopes, epsilon)
        outputs.append(output.to(dtype))
        spans += read
    return torch.cat(outputs, dim=1), spans
