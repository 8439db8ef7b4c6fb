"""torch.compile of a model's blocks (`train.compile`)."""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec

import torch

from alibi_lm.config import Config
from alibi_lm.model.layers import Attention, Block
from alibi_lm.parallel.device import get_device
from alibi_lm.parallel.tensor_parallel import ColumnLinear, RowLinear
from alibi_lm.utils.errors import ConfigError, Problem


def check_compiler(config: Config) -> None:
    """Refuse `train.compile` where nothing can compile for this rank's device.

    Raises:
        ConfigError: it is asked for, and there is no Triton for a GPU or no compiler for a CPU.
    """
    if not config.train.compile:
        return
    if get_device().type == "cuda":
        lacking = find_spec("triton") is None and "Triton, which is not installed"
    else:
        # Imported here: it takes seconds, and only a run that compiles needs it.
        from torch._inductor.config import cpp

        # Where CXX is not set, extensions are built with c++, but torch.compile calls g++.
        compiler = cpp.cxx[-1]
        lacking = shutil.which(compiler) is None and f"the C++ compiler {compiler}"
    if lacking:
        rule, fix = f"needs {lacking}", "install it, or leave train.compile out"
        raise ConfigError(Problem("train.compile", True, rule, fix))


def compile_blocks(model: torch.nn.Module) -> None:
    """Compile every block of a model with torch.compile.

    Attention stays outside of the graphs, because its kernels are compiled already. So do linear
    layers that are split over ranks, because their collectives must run in the same order on all.
    The blocks keep their names, and their hooks run outside of the graphs.
    """
    _keep_out_of_graphs()
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


@cache
def _keep_out_of_graphs() -> None:
    """Patch the classes, once: one graph serves all blocks only if they call the same functions."""
    for owner, name in (
        (Attention, "mix"), (ColumnLinear, "forward_split"), (RowLinear, "forward_split")
    ):  # fmt: skip
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
