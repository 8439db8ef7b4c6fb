"""Eval results as TensorBoard scalars, beside the training's curves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from alibi_lm.evals import results
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.registry import EVALS

FOLDER = "tensorboard"


def write_scalars(eval_model: EvalModel) -> Path | None:
    """Write the results that a report shows into the evals folder; return the events' folder.

    The scalars lie at the checkpoint's step, so that those of several checkpoints make curves:
    `tensorboard --logdir RUN` shows them with the training's. An earlier report's are
    replaced. None where nothing has been measured.
    """
    values = [
        scalar
        for each in EVALS.values()
        if (result := results.shown(each, eval_model)) is not None
        for scalar in each.scalars(result)
    ]
    if not values:
        return None
    from torch.utils.tensorboard import SummaryWriter  # loads slowly

    folder = eval_model.evals_folder / FOLDER
    fresh = folder.with_name(f".{FOLDER}_{os.getpid()}")
    writer = SummaryWriter(str(fresh))
    for tag, value in values:
        writer.add_scalar(tag, value, eval_model.step or 0)
    writer.close()
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder
