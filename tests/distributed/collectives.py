"""Counts what this rank sends, at the lowest level that torch's collectives pass through in Python.

Whichever function of torch.distributed or deepspeed.comm is called, in the end it calls a method
of a ProcessGroup; those are what is counted, once each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Bytes that a rank of n sends by the ring algorithms, of (what is handed over, n).
_SENT: dict[str, tuple[str, Callable[[Sequence[Any], int], float]]] = {
    "allreduce": ("all_reduce", lambda given, n: 2 * (n - 1) / n * size(given[0])),
    "allreduce_coalesced": ("all_reduce", lambda given, n: 2 * (n - 1) / n * size(given[0])),
    "allgather": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "_allgather_base": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "all_gather_single": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "allgather_coalesced": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "allgather_into_tensor_coalesced": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "all_gather_single_coalesced": ("all_gather", lambda given, n: (n - 1) * size(given[1])),
    "reduce_scatter": ("reduce_scatter", lambda given, n: (n - 1) * size(given[0])),
    "_reduce_scatter_base": ("reduce_scatter", lambda given, n: (n - 1) * size(given[0])),
    "reduce_scatter_single": ("reduce_scatter", lambda given, n: (n - 1) * size(given[0])),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter",
                                        lambda given, n: (n - 1) * size(given[0])),
    "reduce_scatter_single_coalesced": ("reduce_scatter",
                                        lambda given, n: (n - 1) * size(given[0])),
    "reduce": ("reduce", lambda given, n: size(given[0])),
    "broadcast": ("broadcast", lambda given, n: size(given[0])),
    "send": ("send", lambda given, n: size(given[0])),
}  # fmt: skip
_RECEIVED = ("recv", "recv_anysource", "barrier", "monitored_barrier")
_UNEXPECTED = ("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single")


def size(tensors: Any) -> int:
    """Bytes of a tensor or of nested lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(size(tensor) for tensor in tensors)


@contextmanager
def counted() -> Iterator[Counter[tuple[tuple[int, ...], str]]]:
    """Within it, bytes that this rank sends by (ranks of the group, operation)."""
    sent: Counter[tuple[tuple[int, ...], str]] = Counter()
    originals = {}
    for name in (*_SENT, *_UNEXPECTED):
        originals[name] = vars(dist.ProcessGroup)[name]  # as it is, not bound by a look-up
        method = _counting(name, getattr(dist.ProcessGroup, name), sent)
        setattr(dist.ProcessGroup, name, method)
    try:
        yield sent
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)


def _counting(name: str, method: Callable[..., Any], sent: Counter[Any]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *given: Any, **options: Any) -> Any:
        assert name in _SENT, f"{name} has no formula"
        operation, formula = _SENT[name]
        ranks = tuple(dist.get_process_group_ranks(group))
        sent[ranks, operation] += round(formula(given, len(ranks)))
        return method(group, *given, **options)

    return call
