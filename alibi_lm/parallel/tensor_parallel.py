"""Linear layers and embeddings split over tensor-parallel ranks, and their collectives.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3. At size 1 all of them are the plain
operations, with nothing added to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_lm.kernels.linear import linear
from alibi_lm.parallel.mesh import ParallelDim
from alibi_lm.parallel.shard import Interval, Shard, mark


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity in forward; an all-reduce of the gradient in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tp: ParallelDim) -> Tensor:
        ctx.tp = tp
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may pass the same tensor to other nodes.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.tp.group)
        return grad, None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """An in-place all-reduce in forward; identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tp: ParallelDim) -> Tensor:
        ctx.mark_dirty(values)
        dist.all_reduce(values, group=tp.group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromTensorParallel(torch.autograd.Function):
    """An all-gather along the last dimension; backward takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tp: ParallelDim) -> Tensor:
        ctx.tp = tp
        parts = [torch.empty_like(values) for _ in range(tp.size)]
        dist.all_gather(parts, values.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.size, dim=-1)[ctx.tp.rank], None


class _ReduceReplicatedKVGradients(torch.autograd.Function):
    """Identity for a weight that `copies` neighboring ranks replicate; sums its gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tp: ParallelDim, copies: int) -> Tensor:
        ctx.tp, ctx.copies = tp, copies
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # One all-reduce over the whole group, one slot per set of copies: no further groups.
        tp, copies = ctx.tp, ctx.copies
        slots = grad.new_zeros(tp.size // copies, *grad.shape)
        slots[tp.rank // copies] = grad
        dist.all_reduce(slots, group=tp.group)
        # A copy: a view would keep all slots alive as long as the gradient.
        return slots[tp.rank // copies].clone(), None, None


def copy_to_tensor_parallel(values: Tensor, tp: ParallelDim) -> Tensor:
    """The replicated input of a split layer, whose gradients are summed over the ranks."""
    return values if tp.size == 1 else _CopyToTensorParallel.apply(values, tp)


def join(values: Tensor, tp: ParallelDim) -> Tensor:
    """All ranks' equally wide [..., n] as [..., size n], in rank order."""
    return values if tp.size == 1 else _GatherFromTensorParallel.apply(values, tp)


class Linear(nn.Linear):
    """A linear layer whose parameters are initialized later, by name."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialized."""


@dataclass(frozen=True)
class ColumnGroup:
    """Outputs of a column-split layer that are split together, such as the query heads."""

    width: int
    """Outputs of the whole layer."""
    copies: int = 1
    """Each slice is held by this many neighboring ranks, so there are size / copies slices."""

    def interval(self, offset: int, tp: ParallelDim) -> Interval:
        """The rank's slice, in a dimension where the part begins at `offset`."""
        slices = tp.size // self.copies
        assert self.width % slices == 0, f"{self.width} outputs over {slices} slices"
        share = self.width // slices
        return Interval(offset + tp.rank // self.copies * share, share)


class ColumnLinear(Linear):
    """A linear layer whose outputs are split: each rank has its slice of every part, in order.

    Parts that several ranks hold alike come last, and are parameters of their own
    (`copied_weight`, `copied_bias`), because norms and checkpoints count them differently. In the
    whole layer they are rows of `weight` and `bias` like the others.
    """

    def __init__(
        self, in_features: int, parts: Sequence[ColumnGroup], *, bias: bool, tp: ParallelDim
    ) -> None:
        if tp.size == 1:
            parts = [ColumnGroup(part.width) for part in parts]
        offsets = [sum(part.width for part in parts[:index]) for index in range(len(parts) + 1)]
        whole = (offsets.pop(), in_features)
        own, copied = (
            tuple(
                part.interval(offset, tp)
                for part, offset in zip(parts, offsets, strict=True)
                if (part.copies > 1) is copies
            )
            for copies in (False, True)
        )
        super().__init__(in_features, sum(part.length for part in own), bias=bias)
        self.tp = tp
        self.copies = max(part.copies for part in parts)
        if tp.size > 1:
            self._mark("weight", "bias", whole, own, is_primary_copy=True)
        if copied:
            rows = sum(part.length for part in copied)
            self.copied_weight = nn.Parameter(torch.empty(rows, in_features))
            if bias:
                self.copied_bias = nn.Parameter(torch.empty(rows))
            is_primary = tp.rank % self.copies == 0
            self._mark("copied_weight", "copied_bias", whole, copied, is_primary_copy=is_primary)

    def _mark(
        self,
        weight: str,
        bias: str,
        whole: tuple[int, int],
        intervals: tuple[Interval, ...],
        *,
        is_primary_copy: bool,
    ) -> None:
        length = sum(part.length for part in intervals)
        mark(getattr(self, weight), Shard(whole, 0, intervals, length, is_primary_copy, "weight"))
        if self.bias is not None:
            mark(
                getattr(self, bias), Shard(whole[:1], 0, intervals, length, is_primary_copy, "bias")
            )

    def forward(self, values: Tensor) -> Tensor:
        """[..., in_features], the same on every rank, to [..., the rank's outputs]."""
        if self.tp.size == 1:
            return linear(values, self.weight, self.bias)
        return self.forward_split(values)

    def forward_split(self, values: Tensor) -> Tensor:
        """`forward` of one of several ranks."""
        values = copy_to_tensor_parallel(values, self.tp)
        out = linear(values, self.weight, self.bias)
        if self.copies == 1:
            return out
        weight = _ReduceReplicatedKVGradients.apply(self.copied_weight, self.tp, self.copies)
        bias = None
        if self.bias is not None:
            bias = _ReduceReplicatedKVGradients.apply(self.copied_bias, self.tp, self.copies)
        return torch.cat([out, linear(values, weight, bias)], dim=-1)


class RowLinear(Linear):
    """A linear layer whose inputs are split: the sum of the ranks' products, and the bias once."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tp: ParallelDim) -> None:
        part = ColumnGroup(in_features).interval(0, tp)
        super().__init__(part.length, out_features, bias=bias)
        self.tp = tp
        if tp.size > 1:
            mark(self.weight, Shard((out_features, in_features), 1, (part,), part.length))

    def forward(self, values: Tensor) -> Tensor:
        """[..., the rank's inputs] to [..., out_features], the same on every rank."""
        if self.tp.size == 1:
            return linear(values, self.weight, self.bias)
        return self.forward_split(values)

    def forward_split(self, values: Tensor) -> Tensor:
        """`forward` of one of several ranks."""
        out = cast(Tensor, _ReduceFromTensorParallel.apply(linear(values, self.weight), self.tp))
        return out if self.bias is None else out + self.bias


def vocabulary_weight(vocab_size: int, width: int, tp: ParallelDim) -> nn.Parameter:
    """An unset [the rank's token ids, width]; the vocabulary is padded to a multiple of the size.

    The padding's rows are 0, and stay so if their gradients are.
    """
    share = -(-vocab_size // tp.size)
    weight = nn.Parameter(torch.empty(share, width))
    if tp.size > 1:
        start = min(tp.rank * share, vocab_size)
        rows = Interval(start, min(share, vocab_size - start))
        mark(weight, Shard((vocab_size, width), 0, (rows,), share))
    return weight


def vocabulary_embedding(tokens: Tensor, weight: Tensor, tp: ParallelDim) -> Tensor:
    """Rows [..., width] of the tokens, of a `vocabulary_weight`; the same on every rank."""
    if tp.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - tp.rank * weight.shape[0]
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
    return _ReduceFromTensorParallel.apply(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), tp)


def vocabulary_logits(hidden: Tensor, weight: Tensor, vocab_size: int, tp: ParallelDim) -> Tensor:
    """hidden [..., width] to the logits [..., vocab_size] of a `vocabulary_weight`."""
    logits = F.linear(copy_to_tensor_parallel(hidden, tp), weight)
    return logits if tp.size == 1 else join(logits, tp)[..., :vocab_size]


def split_columns(shape: tuple[int, int], tp: ParallelDim) -> nn.Parameter:
    """An unset matrix of which each rank has its slice of the columns."""
    part = ColumnGroup(shape[1]).interval(0, tp)
    parameter = nn.Parameter(torch.empty(shape[0], part.length))
    if tp.size > 1:
        mark(parameter, Shard(shape, 1, (part,), part.length))
    return parameter


def split_vector(length: int, tp: ParallelDim) -> nn.Parameter:
    """An unset vector of which each rank has its slice."""
    part = ColumnGroup(length).interval(0, tp)
    parameter = nn.Parameter(torch.empty(part.length))
    if tp.size > 1:
        mark(parameter, Shard((length,), 0, (part,), part.length))
    return parameter
