"""Which engine a layout needs."""

from __future__ import annotations

from typing import Any

from alibi_lm.config import Config
from alibi_lm.parallel.mesh import Mesh
from alibi_lm.train.engine.base import Engine
from alibi_lm.train.engine.plain import PlainEngine


def make_engine(
    config: Config, ds_config: dict[str, Any], mesh: Mesh, *, initial: bool = True
) -> Engine:
    """The engine of a layout; `initial` False leaves the weights unset, to be loaded."""
    if mesh.pp.size == 1:
        return PlainEngine(config, ds_config, mesh, initial=initial)
    # Imported here: DeepSpeed's pipeline is needed by pipelines only.
    from alibi_lm.train.engine.pipeline import PipelineEngine

    return PipelineEngine(config, ds_config, mesh, initial=initial)
