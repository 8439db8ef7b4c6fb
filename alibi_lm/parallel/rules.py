"""Which layouts a run may have."""

from __future__ import annotations

from collections.abc import Iterator

from alibi_lm.config import Config
from alibi_lm.errors import Problem


def layout_problems(config: Config, num_ranks: int) -> Iterator[Problem]:
    """Every rule of the tensor-parallel split that a run on `num_ranks` ranks breaks."""
    tp, model = config.parallel.tp, config.model
    if tp == 1:
        return
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
    if num_ranks % tp:
        yield Problem(
            "parallel.tp",
            tp,
            f"does not divide the {num_ranks} ranks",
            "start a multiple of parallel.tp ranks",
        )
