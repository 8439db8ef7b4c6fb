"""Query blocks on this project's compiled kernel, which gives each block and head its own start.

It goes over the keys at hand twice: over the near ones for the log-sum-exps that prove where to
start, and then over all from there on. So nothing is grouped, copied side by side or merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alibi_lm import kernels
from alibi_lm.model.pruning.block_sparse import BLOCK, LOCAL_KEYS, BlockSparseAttention


def amx_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the compiled kernel cannot serve queries [H, n, D] and their keys [KV, N, D], or None."""
    if q.dtype != torch.bfloat16:
        return f"{q.dtype}"
    backend = kernels.backend()
    if backend is None:
        return kernels.unavailable_reason()
    return backend.attention_unsupported_reason(q[None], k[None], v[None])


class AmxBlockSparseAttention(BlockSparseAttention):
    """Whole blocks of bf16 queries."""

    def _read_near(self) -> int:
        """Log-sum-exps of the blocks' own keys and at least the `LOCAL_KEYS` before them."""
        first = int(self.near[0])
        _, self.lse = self._read(first, self.near.expand(self.num_heads, -1))
        # The kernel starts at multiples of its own block.
        backend = kernels.backend()
        assert backend is not None
        return LOCAL_KEYS + self.size + backend.block

    def _read_on(self, begin: Tensor) -> None:
        """Everything at hand from `begin` [H, blocks] on."""
        self.output, self.lse = self._read(self.source.start, begin)

    def _read(self, first: int, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Output [H, blocks, size, D] and log-sum-exp over the keys from `begin` on.

        Positions below `first`, the first that the kernel is given, are not needed.
        """
        backend = kernels.backend()
        assert backend is not None
        stop = self.begins[-1] + self.size - self.source.start
        keys, values = (
            x[None, :, first - self.source.start : stop]
            for x in (self.source.keys, self.source.values)
        )
        starts = (begin - first).to(torch.int32).repeat_interleave(BLOCK // backend.block, dim=1)
        output, logsumexp = backend.attention_with_logsumexp(
            self.q.flatten(1, 2)[None], keys, values, self.slopes, starts[None]
        )
        shape = (self.count, self.size)
        return output[0].unflatten(1, shape), logsumexp[0].unflatten(1, shape)
