"""Cross entropy of an output layer whose rows, the token ids, are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alibi_lm.model.cross_entropy import IGNORED, ROWS_AT_ONCE, add_product, linear_cross_entropy
from alibi_lm.parallel.mesh import ParallelDim

SPLIT_LOGITS_AT_ONCE = 1 << 24
"""Logits of one product of a rank: its fp32 values are held as a whole."""


def output_losses(
    normed: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp: ParallelDim
) -> Tensor:
    """Losses fp32 [B, T] of targets [B, T], given the output layer's input [B, T, d].

    `weight` is the rank's rows of the output matrix, or all of them.
    """
    rows, labels = normed.flatten(0, 1), targets.flatten()
    if tp.size > 1:
        return split_cross_entropy(rows, weight, labels, vocab_size, tp).view_as(targets)
    return linear_cross_entropy(rows, weight, labels).view_as(targets)


def split_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp: ParallelDim
) -> Tensor:
    """`cross_entropy.linear_cross_entropy` with the rank's rows of the weight.

    All ranks get the same result.

    Products are in the dtype of hidden (or autocast's), softmax and losses in fp32. No rank sees
    another's logits: the ranks exchange three numbers a target (Shoeybi et al. 2019, section 3).

    Args:
        hidden: [N, d], the same on every rank; its gradient is summed over the ranks.
        weight: [share, d]: rows rank * share onwards of the whole weight. Rows from vocab_size
            on are padding: they take no part in the softmax and have no gradient.
        targets: int64 [N], each below vocab_size or `IGNORED`.
        vocab_size: rows of the whole weight.
        tp: the ranks.

    Returns:
        Losses in nats, fp32 [N].
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            return _Split.apply(hidden.to(dtype), weight.to(dtype), targets, vocab_size, tp)
    return _Split.apply(hidden, weight, targets, vocab_size, tp)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tp: ParallelDim
    ) -> Tensor:
        share = weight.shape[0]
        ctx.tp = tp
        ctx.rows = max(ROWS_AT_ONCE, SPLIT_LOGITS_AT_ONCE // share)
        ctx.num_local_rows = min(share, max(0, vocab_size - tp.rank * share))
        local = _local(targets, tp, share)
        # Highest logit, sum of exponentials relative to it, and the target's logit.
        highest, total, wanted = hidden.new_empty(3, len(targets), dtype=torch.float32)
        kept = []
        for part, labels, high, sum_, logit in zip(
            *(x.split(ctx.rows) for x in (hidden, local, highest, total, wanted)), strict=True
        ):
            logits = F.linear(part, weight[: ctx.num_local_rows])
            _local_parts(logits, labels, high, sum_, logit)
            if len(hidden) <= ctx.rows:
                kept = [logits]
        own = highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        total *= (own - highest).exp_()
        both = torch.stack([total, wanted])
        dist.all_reduce(both, group=tp.group)
        log_total = highest + both[0].log()
        ctx.save_for_backward(hidden, weight, targets, local, log_total, *kept)
        return (log_total - both[1]).masked_fill_(targets == IGNORED, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return *_gradients(ctx, grad), None, None, None


def _local(targets: Tensor, tp: ParallelDim, share: int) -> Tensor:
    """Targets as rows of the rank's weight; -1 where they are another rank's, or ignored."""
    local = targets - tp.rank * share
    return local.masked_fill((targets < 0) | (local < 0) | (local >= share), -1)


def _local_parts(
    logits: Tensor, labels: Tensor, highest: Tensor, total: Tensor, wanted: Tensor
) -> None:
    if logits.shape[1] == 0:  # a rank that holds nothing but padding
        highest.fill_(-torch.inf)
        total.zero_()
        wanted.zero_()
        return
    scores = logits.float()
    highest.copy_(scores.amax(dim=1))
    total.copy_((scores - highest[:, None]).exp_().sum(dim=1))
    picked = scores.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    wanted.copy_(picked.masked_fill(labels < 0, 0.0))


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight, targets, local, log_total, *kept = ctx.saved_tensors
    rows = weight[: ctx.num_local_rows]
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    scale = grad.masked_fill(targets == IGNORED, 0.0)
    for part, labels, top, factors, out in zip(
        *(x.split(ctx.rows) for x in (hidden, local, log_total, scale, d_hidden)), strict=True
    ):
        logits = kept[0] if kept else F.linear(part, rows)
        shares = logits.to(torch.float32, copy=bool(kept)).sub_(top[:, None]).exp_()
        if ctx.num_local_rows:
            hit = (labels >= 0).to(shares.dtype)
            shares.scatter_add_(1, labels.clamp(min=0)[:, None], -hit[:, None])
        d_logits = shares.mul_(factors[:, None]).to(hidden.dtype)
        torch.mm(d_logits, rows, out=out)
        add_product(d_weight[: ctx.num_local_rows], d_logits, part)
    dist.all_reduce(d_hidden, group=ctx.tp.group)
    return d_hidden, d_weight.to(weight.dtype)
