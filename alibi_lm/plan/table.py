"""Prints a plan as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from alibi_lm.model.layers import vocab_size
from alibi_lm.plan.communication import Sent
from alibi_lm.plan.planned_run import PlannedRun
from alibi_lm.plan.planner import Plan, RankPlan

ROWS_SHOWN = 8
"""Rows of a list of ranks; longer ones are cut in the middle."""
_GIB, _MIB = 2**30, 2**20
_MEMORY: tuple[tuple[str, Callable[[RankPlan], int]], ...] = (
    ("weights", lambda part: part.states.weights),
    ("gathered", lambda part: part.states.gathered),
    ("gradients", lambda part: part.states.gradients),
    ("master", lambda part: part.states.master),
    ("moments", lambda part: part.states.moments),
    ("buffers", lambda part: part.states.buffers),
    ("on host", lambda part: -part.states.on_host),
    ("activations", lambda part: part.activations.saved),
    ("working", lambda part: part.activations.total - part.activations.saved),
)
_SENT = (
    ("tensor parallel", "tensor"),
    ("stage to stage", "pipeline"),
    ("stage gathers", "pipeline_gathers"),
    ("tied embedding", "tied"),
    ("gradients", "gradients"),
    ("weights", "weights"),
)
NOTES = """\
GiB = 2^30 bytes, MiB = 2^20 bytes, on one rank. "working" is the peak of the loss or, if larger,
of a recomputed block. Not counted: the framework's own memory, fragmentation, and temporaries of
single operations. Bytes sent are those of ring algorithms: an all-reduce of S bytes over n ranks
2 (n-1)/n S, an all-gather or reduce-scatter (n-1)/n S; sums of a few numbers are left out."""


def plan_lines(plan: Plan, *, slopes: bool = False) -> Iterator[str]:
    """The plan of all ranks; `slopes` lists the slope of every head."""
    run = plan.run
    yield from _headlines(plan)
    yield ""
    yield from _places(run, slopes)
    yield ""
    parts = [plan.rank(ranks.start) for ranks in _stage_ranks(run)]
    unit, name = _unit(part.total for part in parts)
    yield f"memory in {name}"
    yield from _table(_memory_rows(parts, unit))
    yield ""
    unit, name = _unit(part.sent.total for part in parts)
    yield f"{name} that a rank sends in a step"
    yield from _table(_sent_rows(parts, unit))
    yield ""
    yield from NOTES.splitlines()
    for note in plan.notes:
        yield f"Note: {note}."


def rank_lines(plan: Plan, rank: int) -> Iterator[str]:
    """Everything about one rank."""
    part, run = plan.rank(rank), plan.run
    place = part.place
    yield (
        f"rank {rank} of {run.layout.num_ranks}: stage {place.stage}, data-parallel place "
        f"{place.data}, tensor-parallel place {place.tensor}"
    )
    yield f"layers   {_layers(run, place.stage)}"
    yield f"heads    {_span(part.heads)}, key/value heads {_span(part.kv_heads)}"
    if part.slopes is not None:
        yield f"slopes   {_all(part.slopes)}"
    batches = part.samples()
    listed = ", ".join(_span(range(batch[0], batch[-1] + 1)) for batch in batches[:ROWS_SHOWN])
    more = "" if len(batches) <= ROWS_SHOWN else f", ... {_span(_range(batches[-1]))}"
    yield f"samples  of the first step: {listed}{more}"
    yield f"holds    {part.num_parameters:,} parameters"
    for name, value in _MEMORY:
        yield f"  {name:<12} {value(part):>19,} bytes"
    yield f"  {'in all':<12} {part.total:>19,} bytes ({part.total / _GIB:.2f} GiB)"
    yield "sends in a step"
    for title, name in _sent_kinds([part]):
        yield f"  {title:<15} {getattr(part.sent, name):>16,.0f} bytes"
    yield "parameters"
    for held in part.parameters:
        yield f"  {held.name:<36} {held.numel:>16,}"


def _headlines(plan: Plan) -> Iterator[str]:
    run = plan.run
    config, layout = run.config, run.layout
    model, train = config.model, config.train
    again = train.activation_checkpointing
    yield (
        f"{config.run.dir} on {layout.describe()}, ZeRO stage {run.zero.stage}, {train.precision}"
    )
    padding = -vocab_size(model) % layout.tp
    padded = f" (padded by {padding})" if padding else ""
    yield (
        f"model       {plan.num_parameters:,} parameters: {model.num_layers} blocks of width "
        f"{model.hidden_size:,}, {model.num_heads} heads, {vocab_size(model):,} token ids{padded}"
    )
    yield (
        f"step        {train.global_batch_size:,} samples of {train.sequence_length:,} tokens = "
        f"{run.tokens_per_step:,} tokens; micro-batches of {train.micro_batch_size}, "
        f"{run.num_micro_batches:,} a rank"
    )
    flops = f"arithmetic  {plan.model_flops:.4g} FLOPs a step"
    if again:
        flops += f", {plan.hardware_flops:.4g} with recomputation"
    yield flops
    if layout.pp > 1:
        yield (
            f"bubble      {plan.bubble:.2%} of the busy time: ({layout.pp} - 1) / "
            f"{run.num_micro_batches}"
        )
    parts = plan.rank(0).activations
    unit, name = _unit([parts.block])
    yield (
        f"block       keeps {parts.block / unit:.2f} {name} of a micro-batch for its backward "
        f"pass, {parts.block_input / unit:.2f} with activation checkpointing "
        f"({'on' if again else 'off'})"
    )
    unit, name = _unit([plan.checkpoint_bytes])
    yield f"checkpoint  {plan.checkpoint_bytes / unit:,.2f} {name}, 12 bytes a parameter"


def _places(run: PlannedRun, slopes: bool) -> Iterator[str]:
    """The stages, heads and samples of the ranks."""
    rows = [
        *_shown(_stage_places(run)),
        *_shown(_tensor_places(run, slopes)),
        *_shown(_data_places(run)),
    ]
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        yield f"{left:<{width}}  {right}".rstrip()


def _stage_places(run: PlannedRun) -> list[tuple[str, str]]:
    return [
        (_ranks([ranks]), f"stage {stage}: {_layers(run, stage)}")
        for stage, ranks in enumerate(_stage_ranks(run))
    ]


def _tensor_places(run: PlannedRun, slopes: bool) -> list[tuple[str, str]]:
    rows = []
    model, layout = run.config.model, run.layout
    for place in range(layout.tp):
        part = RankPlan(run, place)
        same = [range(rank, rank + 1) for rank in range(place, layout.num_ranks, layout.tp)]
        text = f"heads {_span(part.heads)}"
        if model.kv_heads < model.num_heads:
            text += f", key/value heads {_span(part.kv_heads)}"
        if part.slopes is not None:
            text += f", slopes {_all(part.slopes) if slopes else _ends(part.slopes)}"
        everyone = [range(layout.num_ranks)]
        rows.append((_ranks(same if layout.tp > 1 else everyone), text))
    return rows


def _data_places(run: PlannedRun) -> list[tuple[str, str]]:
    rows = []
    layout = run.layout
    for place in range(layout.dp):
        first_ranks = [(stage * layout.dp + place) * layout.tp for stage in range(layout.pp)]
        same = [range(first, first + layout.tp) for first in first_ranks]
        first = RankPlan(run, first_ranks[0]).samples()[0]
        text = f"samples {_span(_range(first))} of a step"
        if run.num_micro_batches > 1:
            every = run.config.train.micro_batch_size * layout.dp
            text += f", and on in steps of {every}"
        rows.append((_ranks(same), text))
    return rows


def _ranks(groups: Sequence[range]) -> str:
    """Ranks in words; the first two of several groups."""
    count = sum(len(ranks) for ranks in groups)
    more = ", ..." if len(groups) > 2 else ""
    return f"rank{'s' * (count > 1)} {', '.join(_span(ranks) for ranks in groups[:2])}{more}"


def _shown(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    if len(rows) <= ROWS_SHOWN:
        return list(rows)
    return [*rows[: ROWS_SHOWN - 2], ("...", ""), rows[-1]]


def _stage_ranks(run: PlannedRun) -> list[range]:
    share = run.layout.dp * run.layout.tp
    return [range(stage * share, (stage + 1) * share) for stage in range(run.layout.pp)]


def _layers(run: PlannedRun, stage: int) -> str:
    last = run.config.model.num_layers + 1
    layers = run.stages[stage]
    blocks = [layer - 1 for layer in layers if 0 < layer < last]
    parts = ["embedding"] if layers.start == 0 else []
    parts.append(f"blocks {_span(range(blocks[0], blocks[-1] + 1))}")
    if layers.stop == last + 1:
        parts.append("head")
    return ", ".join(parts)


def _unit(sizes: Iterable[float]) -> tuple[int, str]:
    return (_GIB, "GiB") if max(sizes) >= _GIB else (_MIB, "MiB")


def _memory_rows(parts: Sequence[RankPlan], unit: int) -> list[list[str]]:
    columns = [(name, value) for name, value in _MEMORY if any(value(part) for part in parts)]
    header = ["stage", "parameters", *(name for name, _ in columns), "micro-batches", "in all"]
    rows = [header]
    for part in parts:
        values = [f"{value(part) / unit:.2f}" for _, value in columns]
        rows.append(
            [
                str(part.place.stage),
                f"{part.num_parameters:,}",
                *values,
                str(part.activations.in_flight),
                f"{part.total / unit:.2f}",
            ]
        )
    return rows


def _sent_kinds(parts: Sequence[RankPlan]) -> list[tuple[str, str]]:
    return [kind for kind in _SENT if any(getattr(part.sent, kind[1]) for part in parts)]


def _sent_rows(parts: Sequence[RankPlan], unit: int) -> list[list[str]]:
    kinds = _sent_kinds(parts)

    def row(stage: int, given: Sent) -> list[str]:
        values = [getattr(given, name) / unit for _, name in kinds]
        return [str(stage), *(f"{value:,.3f}" for value in [*values, given.total / unit])]

    header = ["stage", *(title for title, _ in kinds), "in all"]
    return [header, *(row(part.place.stage, part.sent) for part in parts)]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _range(numbers: Sequence[int]) -> range:
    return range(numbers[0], numbers[-1] + 1)


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _all(slopes: Sequence[float]) -> str:
    return ", ".join(f"{slope:.6g}" for slope in slopes)


def _ends(slopes: Sequence[float]) -> str:
    if len(slopes) <= 2:
        return _all(slopes)
    return f"{slopes[0]:.6g} ... {slopes[-1]:.6g}"
