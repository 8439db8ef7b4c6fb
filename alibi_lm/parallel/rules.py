"""Which layouts a run may have."""

from __future__ import annotations

from collections.abc import Iterator

from alibi_lm.config import Config
from alibi_lm.utils.errors import Problem
from alibi_lm.utils.settings import applicable
from alibi_lm.utils.text import counted


def layout_problems(config: Config, num_ranks: int) -> Iterator[Problem]:
    """Every rule of the tensor-parallel and pipeline split that a run on `num_ranks` ranks breaks.

    `deepspeed_config.stage_problems` has the rules about the ZeRO stage.
    """
    for check in (_heads(config), _layers(config), _ranks(config, num_ranks)):
        yield from applicable(check)


def _heads(config: Config) -> Iterator[Problem]:
    tp, model = config.parallel.tp, config.model
    if model.num_heads % tp:
        rule = f"does not divide model.num_heads = {model.num_heads}"
        yield Problem("parallel.tp", tp, rule, "each rank holds whole heads: give a divisor")
    elif model.kv_heads % tp and tp % model.kv_heads:
        rule = f"neither divides model.num_kv_heads = {model.kv_heads} nor is a multiple of it"
        yield Problem("parallel.tp", tp, rule, "give a divisor or a multiple")


def _layers(config: Config) -> Iterator[Problem]:
    pp, num_layers = config.parallel.pp, config.model.num_layers
    if pp > num_layers:
        rule = f"exceeds model.num_layers = {num_layers}"
        fix = "each stage holds at least one layer: give fewer stages"
        yield Problem("parallel.pp", pp, rule, fix)


def _ranks(config: Config, num_ranks: int) -> Iterator[Problem]:
    tp, pp = config.parallel.tp, config.parallel.pp
    if num_ranks % (tp * pp):
        rule = f"does not divide {counted(num_ranks, 'rank')}"
        fix = f"start a multiple of {tp * pp} ranks, or lower one of them"
        yield Problem("parallel", f"tp {tp} x pp {pp}", rule, fix)
