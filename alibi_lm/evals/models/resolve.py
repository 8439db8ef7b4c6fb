"""From what a command names to the subject that is judged."""

from __future__ import annotations

from alibi_lm.checkpoint.step import open_run
from alibi_lm.evals.models.base import DEFAULTS, HF, Choices, NativeSubject, Subject
from alibi_lm.evals.models.transformers_model import open_hf
from alibi_lm.utils.errors import ConfigError, Problem


def open_subject(name: str, choices: Choices = DEFAULTS) -> Subject:
    """The subject that a command names.

    Args:
        name: a run folder (its newest complete step), a step folder, `hf:FOLDER` or the hub's
            `hf:ORGANISATION/MODEL[@REVISION]`.
        choices: the user's.

    Raises:
        CheckpointError: there is nothing usable of that name.
        ConfigError: a choice that the subject does not have.
    """
    if name.startswith(HF):
        return choices.ranks.together(lambda: open_hf(name.removeprefix(HF), choices))
    if choices.engine == "hf":
        rule = "computes Hugging Face models"
        fix = f"give {HF}FOLDER, or leave it out"
        raise ConfigError(Problem("--engine", choices.engine, rule, fix))
    return choices.ranks.together(lambda: NativeSubject(open_run(name), choices))
