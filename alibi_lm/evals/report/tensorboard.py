"""Eval results as TensorBoard scalars, beside the training's curves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alibi_lm.evals import results
from alibi_lm.evals.models.base import EvalModel

FOLDER = "tensorboard"


def scalars(found: Mapping[str, Mapping[str, Any] | None]) -> Iterator[tuple[str, float]]:
    """Tag and value of everything in the results that is one number a model."""
    perplexity, needle = found.get("perplexity"), found.get("needle")
    for row in perplexity["rows"] if perplexity else ():
        yield f"eval_perplexity/{row['length']}", row["perplexity"]
        if row["bits_per_byte"] is not None:
            yield f"eval_bits_per_byte/{row['length']}", row["bits_per_byte"]
    for row in (
        perplexity["truncated_context"]["rows"]
        if perplexity and perplexity.get("truncated_context")
        else ()
    ):
        yield f"eval_loss_gap/{row['length']}", row["loss_gap"]
    for row in needle["by_length"] if needle else ():
        yield f"eval_needle_ranking/{row['length']}", row["ranking"]["rate"]
        yield f"eval_needle_generation/{row['length']}", row["generation"]["rate"]
    retrieval, problems = found.get("retrieval"), found.get("generalization")
    for cell in retrieval["cells"] if retrieval else ():
        yield f"eval_retrieval_{cell['task']}/{cell['length']}", cell["score"]["rate"]
    for cell in problems["cells"] if problems else ():
        yield f"eval_generalization_{cell['task']}/{cell['items']}", cell["rate"]


def write_scalars(eval_model: EvalModel) -> Path | None:
    """Write what has been measured into the evals folder; return the events' folder.

    The scalars lie at the checkpoint's step, so that those of several checkpoints make curves:
    `tensorboard --logdir RUN` shows them with the training's. What an earlier report wrote is
    replaced. None where nothing has been measured.
    """
    names = ("perplexity", "needle", "retrieval", "generalization")
    values = list(scalars({name: results.stored(eval_model, name) for name in names}))
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
