"""Which layouts a run may have."""

from __future__ import annotations

from collections.abc import Iterator

from alibi_lm.config import Config
from alibi_lm.utils.errors import Problem


def layout_problems(config: Config, num_ranks: int) -> Iterator[Problem]:
    """Every rule of the tensor-parallel and pipeline split that a run on `num_ranks` ranks breaks.

    The ZeRO stage's part in them is `deepspeed_config.stage_problems`.
    """
    tp, pp, model = config.parallel.tp, config.parallel.pp, config.model
    if tp < 1 or pp < 1:
        return  # the section's own rules say so
    if model.num_heads % tp:
        yield Problem(
            "parallel.tp",
            tp,
            f"does not divide model.num_heads = {model.num_heads}",
            "each rank holds whole heads: give a divisor",
        )
    elif model.kv_heads % tp and tp % model.kv_heads:
        yield Problem(
            "parallel.tp",
            tp,
            f"neither divides model.num_kv_heads = {model.kv_heads} nor is a multiple of it",
            "give a divisor or a multiple",
        )
    if pp > model.num_layers:
        yield Problem(
            "parallel.pp",
            pp,
            f"is more than model.num_layers = {model.num_layers}",
            "each stage holds at least one block: give fewer stages",
        )
    if num_ranks % (tp * pp):
        yield Problem(
            "parallel",
            f"tp {tp} x pp {pp}",
            f"does not divide the {num_ranks} ranks",
            f"start a multiple of {tp * pp} ranks, or lower one of them",
        )
