"""Simulates how often ZeRO-3 gathers each parameter and the peak number of gathered elements.

DeepSpeed's coordinator (`zero/partitioned_param_coordinator.py`) records the order in which modules
request their weights, prefetches by it, and keeps what is requested again soon. This module applies
its rules to that order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from alibi_lm.plan.parameters import HeldParameter
from alibi_lm.plan.planned_run import ZeroSettings


class _Event(NamedTuple):
    """A module requests its weights, or releases them."""

    kind: Literal["fetch", "release"]
    module: str


@dataclass(frozen=True)
class Zero3Gathers:
    """The parameters that ZeRO-3 gathers."""

    counts: dict[str, int]
    """Gathers of each parameter in a micro-batch; 0 for persistent ones."""
    persistent: frozenset[str]
    """Parameters that stay whole during a step, and are gathered once after each."""
    peak_gathered: int
    """The peak number of gathered elements."""


# A block's modules with weights in the order of its forward pass, and the modules around them.
_INSIDE = (
    ("attention", ("attention.qkv", "attention.output")),
    ("mlp", ("mlp.up", "mlp.down")),
)


def _forward(block: str, *, stops_early: bool = False) -> Iterator[_Event]:
    yield _Event("fetch", block)
    for part, linears in _INSIDE:
        yield from _both(f"{block}.{part}_norm")
        yield _Event("fetch", f"{block}.{part}")
        for linear in linears:
            yield _Event("fetch", f"{block}.{linear}")
            # Recomputation ends inside the last module, once its input is there.
            if not (stops_early and linear == "mlp.down"):
                yield _Event("release", f"{block}.{linear}")
        if not (stops_early and part == "mlp"):
            yield _Event("release", f"{block}.{part}")
    if not stops_early:
        yield _Event("release", block)


def _backward(block: str, *, recompute: bool) -> Iterator[_Event]:
    yield _Event("fetch", block)
    for part, linears in reversed(_INSIDE):
        yield _Event("fetch", f"{block}.{part}")
        for linear in reversed(linears):
            yield _Event("fetch", f"{block}.{linear}")
            if recompute and linear == "mlp.down":
                yield from _forward(block, stops_early=True)
            yield _Event("release", f"{block}.{linear}")
        yield _Event("release", f"{block}.{part}")
        yield from _both(f"{block}.{part}_norm")
    yield _Event("release", block)


def _both(module: str) -> Iterator[_Event]:
    yield _Event("fetch", module)
    yield _Event("release", module)


def _events(num_blocks: int, embedding_norm: bool, recompute: bool) -> Iterator[_Event]:
    """One micro-batch. The root module requests the output matrix, which the loss uses."""
    blocks = [f"blocks.{index}" for index in range(num_blocks)]
    embedding = [_Event("fetch", "embedding")]
    if embedding_norm:
        embedding += _both("embedding.norm")
    embedding += [_Event("release", "embedding")]
    yield _Event("fetch", "root")
    yield from embedding
    for block in blocks:
        yield from _forward(block)
    yield from _both("head.norm")
    yield _Event("release", "root")
    yield _Event("fetch", "root")
    yield from _both("head.norm")
    for block in reversed(blocks):
        yield from _backward(block, recompute=recompute)
    yield from embedding
    yield _Event("release", "root")


def simulate_gathers(
    parameters: Sequence[HeldParameter], zero: ZeroSettings, tied: bool, recompute: bool
) -> Zero3Gathers:
    """The gathers of a rank's parameters in one micro-batch (from the third on)."""
    sizes = {held.name: held.numel for held in parameters}
    modules: dict[str, list[str]] = {}
    for name in sizes:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    modules["root"] = ["embedding.weight" if tied else "head.weight"]
    modules.pop("head", None)
    num_blocks = len({name.split(".")[1] for name in sizes if name.startswith("blocks.")})
    events = list(_events(num_blocks, "embedding.norm" in modules, recompute))
    persistent = _persistent(parameters, zero)
    coordinator = _Coordinator(events, modules, sizes, persistent, zero)
    counts, most = coordinator.simulate()
    return Zero3Gathers({name: counts[name] for name in sizes}, persistent, most)


def _persistent(parameters: Sequence[HeldParameter], zero: ZeroSettings) -> frozenset[str]:
    total, names = 0, []
    for held in parameters:
        small = held.numel <= zero.persistence_threshold
        if small and held.numel + total <= zero.model_persistence_threshold:
            total += held.numel
            names.append(held.name)
    return frozenset(names)


class _Coordinator:
    """The rules of DeepSpeed's `PartitionedParameterCoordinator`, on parameter names."""

    def __init__(
        self,
        events: Sequence[_Event],
        modules: dict[str, list[str]],
        sizes: dict[str, int],
        persistent: frozenset[str],
        zero: ZeroSettings,
    ) -> None:
        self.events = events
        self.modules = modules
        self.sizes = sizes
        self.persistent = persistent
        self.zero = zero
        self.order = [event.module for event in events if event.kind == "fetch"]
        self.queue = deque(
            (name, step) for step, module in enumerate(self.order) for name in self._of(module)
        )
        self.latest = dict.fromkeys(sizes, -1)  # the step for which each was last gathered
        self.whole = set(persistent)
        self.active: dict[str, set[str]] = {name: set() for name in sizes}
        self.available = 0
        self.counts: Counter[str] = Counter()

    def _of(self, module: str) -> list[str]:
        return self.modules.get(module, [])

    def simulate(self) -> tuple[Counter[str], int]:
        """Gathers of each parameter, and the most elements whole at once."""
        step, most = 0, 0
        kept = sum(self.sizes[name] for name in self.persistent)
        for event in self.events:
            if event.kind == "fetch":
                self._fetch(event.module, step)
                step += 1
                most = max(most, self.available)
            else:
                self._release(event.module, step)
        return self.counts, most + kept

    def _gather(self, names: Sequence[str]) -> None:
        for name in names:
            self.whole.add(name)
            self.counts[name] += 1
            self.available += self.sizes[name]

    def _fetch(self, module: str, step: int) -> None:
        names = self._of(module)
        self._gather([name for name in names if name not in self.whole])
        for name in names:
            self.active[name].add(module)
        pending = {name for name in names if self.latest[name] < step}
        while self.queue and pending:
            name, used_at = self.queue.popleft()
            self.latest[name] = used_at
            pending.discard(name)
        room = self.zero.max_live_parameters - self.available
        room = min(room, self.zero.prefetch_bucket_size)
        ahead: list[str] = []
        total = 0
        while self.queue and total < room:
            name, used_at = self.queue.popleft()
            self.latest[name] = max(self.latest[name], used_at)
            if name not in self.whole and name not in ahead:
                ahead.append(name)
                total += self.sizes[name]
        self._gather(ahead)

    def _release(self, module: str, step: int) -> None:
        names = self._of(module)
        for name in names:
            self.active[name].discard(module)
        keep = set(self.persistent) | {name for name in names if self.latest[name] > step}
        candidates = [
            name
            for name in names
            if name in self.whole and name not in keep and not self.active[name]
        ]
        if not candidates:
            return
        soon: set[str] = set()
        traversed = 0
        for later in self.order[step:]:
            if traversed >= self.zero.max_reuse_distance:
                break
            soon.update(self._of(later))
            traversed += sum(self.sizes[name] for name in self._of(later))
        for name in candidates:
            if name not in soon:
                self.whole.discard(name)
                self.available -= self.sizes[name]
