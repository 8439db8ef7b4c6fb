"""From the name on the command line to the model."""

from __future__ import annotations

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.evals.models.base import DEFAULTS, HF, EvalModel, EvalOptions, NativeModel
from alibi_lm.evals.models.transformers_model import open_hf
from alibi_lm.parallel.errors import run_on_all_ranks
from alibi_lm.utils.errors import ConfigError, Problem


def resolve_model(name: str, options: EvalOptions = DEFAULTS) -> EvalModel:
    """The model of a name.

    Args:
        name: a run folder (its newest complete step), a step folder, `hf:FOLDER` or the hub's
            `hf:ORGANIZATION/MODEL[@REVISION]`.
        options: the user's.

    Raises:
        CheckpointError: there is nothing usable of that name.
        ConfigError: an option that the model does not have.
    """
    if name.startswith(HF):
        return run_on_all_ranks(lambda: open_hf(name.removeprefix(HF), options))
    if options.engine == "hf":
        rule = "computes Hugging Face models"
        fix = f"give {HF}FOLDER, or leave it out"
        raise ConfigError(Problem("--engine", options.engine, rule, fix))
    return run_on_all_ranks(lambda: NativeModel(open_checkpoint(name), options))
