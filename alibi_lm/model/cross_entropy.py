"""Cross entropy of an output layer whose fp32 logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alibi_lm.kernels import backend_for
from alibi_lm.kernels.linear import add_weight_gradient, weight_gradient

IGNORED = -100
"""A target of this value has loss 0 and no gradient."""

# Logits of one product, in the dtype of the model: more rows than this are done in portions.
# Fewer rows than 512 make slow products.
LOGITS_AT_ONCE = 1 << 27
# Where there are more logits than this, those of the portions are recomputed in the backward pass.
LOGITS_KEPT = 1 << 28
ROWS_AT_ONCE = 512
# fp32 values of one softmax: 4 MiB stay in a core's cache over its passes.
SOFTMAX_AT_ONCE = 1 << 20
# Values of a product that is rounded before it is added to an fp32 sum.
PRODUCT_AT_ONCE = 1 << 24


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Losses in nats, fp32 [N], of softmax(hidden @ weight.T) against targets.

    Products are in the dtype of hidden (or autocast's), softmax and losses in fp32, and the
    gradient of the weight is summed in fp32.

    Args:
        hidden: [N, d].
        weight: [V, d].
        targets: int64 [N], each below V or `IGNORED`.
    """
    few = len(hidden) * weight.shape[0] <= LOGITS_KEPT
    keep = few and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # A column of a wider matrix, flattened, is still a view with gaps, which the kernel refuses.
    targets = targets.contiguous()
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            return _LinearCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), targets, keep)
    return _LinearCrossEntropy.apply(hidden, weight, targets, keep)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, keep: bool) -> Tensor:
        rows = max(ROWS_AT_ONCE, LOGITS_AT_ONCE // weight.shape[0])
        losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        ctx.backend = backend_for(hidden)
        kept, logsumexps = [], []
        for part, labels, out in zip(
            hidden.split(rows), targets.split(rows), losses.split(rows), strict=True
        ):
            logits = F.linear(part, weight)
            if keep:
                kept.append(logits)
            if ctx.backend:
                logsumexps.append(ctx.backend.loss_forward(logits, labels, out))
            else:
                _losses(logits, labels, out)
        ctx.rows = rows
        ctx.num_kept = len(kept)
        ctx.save_for_backward(hidden, weight, targets, *kept, *logsumexps)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return *_gradients(ctx, grad), None, None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden, weight, targets, *saved = ctx.saved_tensors
    kept, logsumexps = saved[: ctx.num_kept], saved[ctx.num_kept :]
    d_hidden = torch.empty_like(hidden)
    d_weight: Tensor | None = None
    parts = (x.split(ctx.rows) for x in (hidden, targets, grad.contiguous(), d_hidden))
    for index, (part, labels, scale, out) in enumerate(zip(*parts, strict=True)):
        logits = kept[index] if kept else F.linear(part, weight)
        # Recomputed logits are not needed again, so the gradient overwrites them.
        d_logits = torch.empty_like(logits) if kept else logits
        if ctx.backend:
            ctx.backend.loss_backward(logits, labels, logsumexps[index], scale, d_logits)
        else:
            _logit_gradients(logits, labels, scale, d_logits)
        torch.mm(d_logits, weight, out=out)
        if not ctx.needs_input_grad[1]:
            continue
        if len(hidden) <= ctx.rows:
            d_weight = weight_gradient(d_logits, part)
        else:
            if d_weight is None:
                d_weight = torch.zeros_like(weight, dtype=torch.float32)
            add_product(d_weight, d_logits, part)
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, without a second matrix of its size.

    Args:
        total: fp32 [V, d].
        left: [n, V].
        right: [n, d], in left's dtype.
    """
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
        return
    if add_weight_gradient(total, left, right):
        return
    rows = max(1, PRODUCT_AT_ONCE // max(1, total.shape[1]))
    for part, columns in zip(total.split(rows), left.split(rows, dim=1), strict=True):
        part += columns.T @ right


def _losses(logits: Tensor, targets: Tensor, out: Tensor) -> None:
    block = max(1, SOFTMAX_AT_ONCE // logits.shape[1])
    for part, labels, losses in zip(
        logits.split(block), targets.split(block), out.split(block), strict=True
    ):
        scores = part.float().log_softmax(dim=-1)
        losses.copy_(F.nll_loss(scores, labels, reduction="none", ignore_index=IGNORED))


def _logit_gradients(logits: Tensor, targets: Tensor, grad: Tensor, result: Tensor) -> None:
    """Fill result, which may be logits, with grad x (softmax - one hot) [n, V]."""
    block = max(1, SOFTMAX_AT_ONCE // logits.shape[1])
    scale = grad.masked_fill(targets == IGNORED, 0.0)
    for part, labels, factors, out in zip(
        *(x.split(block) for x in (logits, targets, scale, result)), strict=True
    ):
        shares = part.float().softmax(dim=-1)
        places = labels.clamp(min=0).unsqueeze(1)
        shares.scatter_add_(1, places, shares.new_full((1, 1), -1.0).expand_as(places))
        out.copy_(shares.mul_(factors.unsqueeze(1)))
